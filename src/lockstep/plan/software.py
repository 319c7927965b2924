"""What the code that trains does with the same mathematics: which kernels, what it overlaps, in which types it sums.

It is an input: `ours` by default; the published results come from others, whose settings are in their sources.
"""

from dataclasses import dataclass, replace
from typing import Literal

Stages = Literal["layers", "ends", "costs"]


@dataclass(frozen=True)
class Kept:
    """Bytes of a parameter, of its gradient, and of what the optimizer has for it."""

    parameter: float = 4
    gradient: float = 4
    optimizer: float = 8


MASTERS = Kept(2, 4, 12)
"""bf16 weights, gradients summed in fp32, fp32 master weights and Adam's moments."""
NARROW = Kept(2, 2, 12)
"""The same with 16-bit gradients."""
PURE = Kept(2, 2, 4)
"""Everything in bf16."""


@dataclass(frozen=True)
class Software:
    """What a framework keeps, fuses and overlaps."""

    name: str
    fused: bool = False
    """Elementwise operations run in few kernels: compiled, or Transformer Engine's."""
    attention: Literal["matrix", "flash2", "flash"] = "flash"
    """matrix: scores are written to memory; flash2: FlashAttention 2, which does not use Hopper's tensor cores well."""
    overlaps_tensor: bool = False
    """Tensor-parallel traffic behind matrix products."""
    overlaps_experts: bool = False
    """Tokens are sent to experts behind other work, and permuted on the way; activation functions, and narrow types,
    are written by the kernels of the experts' products.
    """
    sends_once: bool = False
    """A token whose experts are on one other node is sent there once."""
    overlaps_gradients: bool = True
    """Gradients are sent while backward still computes."""
    sequence: bool = True
    """What tensor parallelism does not cut is cut along the sequence."""
    graphs: bool = False
    """CUDA graphs: kernels cost the host nothing."""
    graphs_attention: bool = False
    """The same of all kernels but the experts'."""
    host: float = 1.0
    """Of the time that Megatron's hosts need to issue a layer's kernels (`launch_layer`), what this one needs."""
    gradient_bytes: int = 4
    """Of a gradient when it is reduced."""
    gathered_bytes: int = 2
    """Of a parameter when it is gathered."""
    gathers_at_two: bool = False
    """Its stage 2 keeps parameters in shards as well, and gathers them once a micro-batch (FSDP's SHARD_GRAD_OP)."""
    stages: Stages = "layers"
    """How layers are spread over the stages of a pipeline: evenly; with embedding and head as a layer each; by cost."""
    factor: str | None = None
    """The constant that its step times are multiplied by, found from its own results; None: 1."""
    kept: Kept = Kept()
    fused_loss: bool = False
    """Logits are not held in fp32 beside their gradient."""
    frozen: bool = False
    """Weights have no gradients: backward has one product for each of forward's, and the optimizer next to nothing."""
    lockstep_engines: bool = False
    """Lockstep's: gradients live in the buckets that they are sent from, zero2 reduces each micro-batch's, weights that
    stay whole are cast to bf16 for a step, a tied head's gradient is summed over its two stages.
    """
    lockstep_loss: bool = False
    """Cross entropy by a kernel that never holds logits in fp32."""
    buckets: bool = True
    """Gradients have buffers of their own to be sent from."""
    allocator: Literal["allocated", "reserved", "nvidia-smi"] = "allocated"
    """What its memory figures count."""


OURS = Software("lockstep", lockstep_loss=True, lockstep_engines=True, buckets=False, host=0.4, stages="costs")
COMPILED = replace(OURS, name="lockstep, compiled", fused=True, host=0.15)
"""Some 60 kernels of a layer, forward and backward, at 20 us each; compiled, some 20. Set, not fitted."""
