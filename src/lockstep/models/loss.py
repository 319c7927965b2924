"""Losses as sums with a count, so that ranks and micro-batches of different sizes can be weighted rightly."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.config.own import imported
from lockstep.data.batch import IGNORED
from lockstep.data.dataset import Kind
from lockstep.errors import UserError
from lockstep.models.kernels import usable_on
from lockstep.uncompiled import uncompiled

MANY_CLASSES = 1024
"""From here on the outputs are large enough for kernels of our own."""
LossSum = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> the sum of the losses."""
Measure = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(outputs, targets) -> (the sum of the losses, correct predictions)."""


def cross_entropy_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples, or over tokens that are not padding."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def squared_error_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples of the mean squared error of a sample's outputs."""
    return F.mse_loss(outputs, targets, reduction="sum") / targets[0].numel()


def loss_for(kind: Kind, own: str | None = None) -> LossSum:
    """`own`: where a user's stands."""
    if own is not None:
        return OwnLoss(own)
    return squared_error_sum if kind == "regression" else cross_entropy_sum


class OwnLoss:
    """A user's loss, a mean over samples (or over tokens that are not padding), as a sum."""

    def __init__(self, path: str) -> None:
        self.path, self.mean = path, imported(path, "train.loss")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean = self.mean(outputs, targets)
        if not isinstance(mean, Tensor) or mean.dim():
            raise UserError(f"train.loss {self.path} must return one number, the mean of the losses, as a tensor")
        count = len(targets) if targets.is_floating_point() else (targets != IGNORED).sum()
        return mean * count


def with_correct_count(loss: LossSum) -> Measure:
    """(outputs, targets) -> (sum of losses, correct predictions): one function, so that it can be compiled as one.

    The loss is taken in fp32 or better, whatever the outputs come in.
    """

    def measure(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if loss is cross_entropy_sum and outputs.shape[-1] >= MANY_CLASSES and usable_on(outputs):
            return fused_cross_entropy(outputs, targets)
        if outputs.dtype in (torch.bfloat16, torch.float16):
            outputs = outputs.float()
        return loss(outputs, targets), correct_count(outputs, targets)

    return measure


@uncompiled
def fused_cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Both by our own kernels."""
    from lockstep.models.kernels.cross_entropy import cross_entropy  # Triton is where GPUs are

    return cross_entropy(outputs.flatten(0, -2), targets.flatten(), IGNORED)


def correct_count(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many targets the largest output names; 0 for regression."""
    if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:  # the latter of a user's own
        return torch.zeros((), device=outputs.device)
    return (outputs.detach().argmax(-1) == targets).sum()
