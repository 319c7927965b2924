"""Losses as sums with a count, so that ranks and micro-batches of different sizes can be weighted rightly."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.data.batch import IGNORED
from lockstep.data.dataset import Kind

HAS_TRITON = find_spec("triton") is not None
LossSum = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> the sum of the losses."""


def cross_entropy_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples, or over tokens that are not padding."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def squared_error_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples of the mean squared error of a sample's outputs."""
    return F.mse_loss(outputs, targets, reduction="sum") / targets.shape[1]


def loss_for(kind: Kind) -> LossSum:
    return squared_error_sum if kind == "regression" else cross_entropy_sum


def with_correct_count(loss: LossSum) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(outputs, targets) -> (sum of losses, correct predictions): one function, so that it can be compiled as one."""

    def measure(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if loss is cross_entropy_sum and fused_is_faster(outputs):
            return fused(outputs.flatten(0, -2), targets.flatten())
        return loss(outputs, targets), correct_count(outputs, targets)

    return measure


def fused_is_faster(outputs: Tensor) -> bool:
    """On a GPU, for more classes than fit into a few registers; our kernels compute in fp32."""
    return HAS_TRITON and outputs.is_cuda and outputs.dtype != torch.float64 and outputs.shape[-1] >= 1024


@torch.compiler.disable
def fused(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from lockstep.models.fused_cross_entropy import fused_cross_entropy  # Triton is for GPUs

    return fused_cross_entropy(outputs, targets, IGNORED)


def correct_count(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many targets the largest output names; 0 for regression."""
    if targets.is_floating_point():
        return torch.zeros((), device=outputs.device)
    return (outputs.detach().argmax(-1) == targets).sum()
