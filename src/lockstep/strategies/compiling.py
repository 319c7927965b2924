"""torch.compile, as the config asks for it.

There is no autotuning: neither other forms of the fused kernels nor other matrix products than cuBLAS's made the
steps of GPT-2 faster. CUDA graphs are not used: the host runs ahead of the device anyway, and they would move the
gradients that hooks refer to.

Evaluation compiles no graphs for its own mode and batch size: without a matching graph it runs eagerly. Only
the loss is compiled for it too, as eagerly it would hold several copies of the logits.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models.blocks import blocks_of
from lockstep.strategies.options import Options


def compiled(function: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """`function`, compiled if that was asked for."""
    if options.compile == "none":
        return function
    result: Callable[..., Any] = torch.compile(function)
    return result


def compile_model(model: nn.Module, options: Options) -> None:
    """In place, so that names stay: as one, or block by block."""
    if options.compile == "model":
        prepare_positions(model, options.dtype)
        model.compile()
    else:
        compile_blocks(model, options)


def prepare_positions(model: nn.Module, dtype: torch.dtype) -> None:
    """RoPE's table is made outside of what is compiled."""
    shape: Any = getattr(model, "shape", None)
    if shape is not None and shape.position == "rope":
        positions: Any = model.positions
        positions.prepare(shape.context, next(model.parameters()).device, dtype)


def compile_blocks(model: nn.Module, options: Options) -> None:
    """Compile inside the blocks, so that hooks stay outside: they reduce gradients, and gather weights, per block."""
    if options.compile == "none":
        return
    blocks = blocks_of(model)
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 4 * len(blocks))  # blocks that differ are compiled one by one
    for _, block in blocks:
        block.forward = compiled(block.forward, options)
        attention: Any = getattr(block, "attention", None)
        if getattr(getattr(attention, "shape", None), "position", "") == "rope":
            block.register_forward_pre_hook(partial(prepare_before, attention.positions))


def prepare_before(positions: Any, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Hooks stay outside of what is compiled: RoPE's table is made here."""
    positions.prepare(inputs[0].shape[1], inputs[0].device, inputs[0].dtype)


def only_compiled_graphs(options: Options) -> AbstractContextManager[Any]:
    """Inside, what would have to be compiled runs eagerly."""
    if options.compile == "none":
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("eager_on_recompile")
    return stance


def seconds_compiling() -> float:
    """Seconds that this process has spent on compiling; PyTorch counts them, under a private name."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0.0
    count: Any = getattr(sys.modules["torch._dynamo.utils"], "calculate_time_spent", dict)
    return float(count().get("total_wall_time", 0.0))
