"""Losses as sums with a count, so that ranks and micro-batches of different sizes can be weighted rightly."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.data.batch import IGNORED, Batch
from lockstep.data.dataset import Kind

LossSum = Callable[[Tensor, Batch], Tensor]


def cross_entropy_sum(outputs: Tensor, batch: Batch) -> Tensor:
    """Sum over samples, or over tokens that are not padding."""
    return F.cross_entropy(outputs.flatten(0, -2), batch.targets.flatten(), reduction="sum", ignore_index=IGNORED)


def squared_error_sum(outputs: Tensor, batch: Batch) -> Tensor:
    """Sum over samples of the mean squared error of a sample's outputs."""
    return F.mse_loss(outputs, batch.targets, reduction="sum") / batch.targets.shape[1]


def loss_for(kind: Kind) -> LossSum:
    return squared_error_sum if kind == "regression" else cross_entropy_sum


def correct_count(outputs: Tensor, batch: Batch) -> Tensor:
    """How many targets the largest output names; 0 for regression."""
    if batch.targets.is_floating_point() or batch.filler:
        return torch.zeros((), device=outputs.device)
    return (outputs.detach().argmax(-1) == batch.targets).sum().float()
