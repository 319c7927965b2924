"""Options of a step other than how it is parallelized."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from lockstep.config import Parallel
from lockstep.data import Inputs
from lockstep.models.loss import LossSum
from lockstep.models.recompute import Recompute

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, **dict.fromkeys(("bf16", "fp16", "fp8"), torch.float32)}
"""Dtype of the weights for each precision; bf16, fp16 and fp8 compute under autocast."""

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Of what is not in FP8, too."""


@dataclass
class Options:
    """All that `parallelize` needs to know besides the model and the layout."""

    loss: LossSum
    make_optimizer: MakeOptimizer
    """Called with what is left to train on this rank."""
    parallel: Parallel = field(default_factory=Parallel)
    accumulation: int = 1
    """Micro-batches of a step."""
    clip_norm: float | None = None
    clip_value: float | None = None
    """Of each element of a gradient, instead."""
    ema: float | None = None
    """The decay of an average of the weights, for evaluation."""
    precision: str = "fp32"
    compile: str = "none"
    """none, blocks or model: what torch.compile compiles as one unit."""
    recompute: Recompute = "none"
    recompute_every: int = 2
    batch_size: int | None = None
    """Of the global batch, where it is known beforehand."""
    example: Inputs = None
    """A batch of one sample's inputs, for an engine that must have computed before it can load."""
    save_trained_only: bool = False
    """Checkpoints leave out what is frozen: the model that adapters were put on is somewhere else already."""
    keep_gradients: bool = False
    """Gradients are read after the step: an engine that frees them must keep them."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return DTYPES[self.precision]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of matrix products, where it differs from the weights'."""
        return COMPUTE_DTYPES.get(self.precision)
