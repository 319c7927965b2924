"""Losses as sums with a count, so that ranks and micro-batches of different sizes can be weighted rightly."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import isclose, nan
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.config.user_code import imported
from lockstep.data.batch import IGNORED
from lockstep.data.dataset import Kind
from lockstep.errors import UserError
from lockstep.models.kernels import usable_on
from lockstep.uncompiled import uncompiled

MANY_CLASSES = 1024
"""From here on the outputs are large enough for kernels of our own."""
LossSum = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) -> the sum of the losses."""
Measure = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""(outputs, targets) -> (the sum of the losses, correct predictions; NaN where these are not known)."""


@dataclass(frozen=True)
class CrossEntropy:
    """Sum over samples, or over tokens that are not padding. Classes are outputs' last dimension."""

    z_loss: float = 0.0
    """Weight of the squared logsumexp of the logits, which keeps them small. It is in the gradients only: the value
    stays the cross entropy, which can be compared with other runs' and with an evaluation's.
    """

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits, targets = outputs.flatten(0, -2), targets.flatten()
        loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        if not self.z_loss:
            return loss
        squares = logits.logsumexp(-1).square().masked_fill(targets == IGNORED, 0.0).sum()
        return loss + self.z_loss * (squares - squares.detach())


cross_entropy_sum = CrossEntropy()


def squared_error_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples of the mean squared error of a sample's outputs."""
    return F.mse_loss(outputs, targets, reduction="sum") / targets[0].numel()


def loss_for(kind: Kind, own: str | None = None, classes: int = 8, z_loss: float = 0.0) -> LossSum:
    """`own`: where a user's stands. `classes`: of the data, by which the user's is tried."""
    if z_loss and (own is not None or kind == "regression"):
        which = f"train.loss {own}" if own is not None else "the mean squared error of regression"
        raise UserError(f"train.z_loss {z_loss:g} belongs to the cross entropy, and the loss is {which}; leave one out")
    if own is not None:
        return OwnLoss(own, classes)
    return squared_error_sum if kind == "regression" else CrossEntropy(z_loss)


class OwnLoss:
    """A user's loss, a mean over samples (or over tokens that are not padding), as a sum."""

    def __init__(self, path: str, classes: int = 8) -> None:
        self.path, self.mean = path, imported(path, "train.loss")
        self.ignored = ignored_by(self.mean, classes, path)

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        mean = self.mean(outputs, targets)
        if not isinstance(mean, Tensor) or mean.dim():
            raise UserError(f"train.loss {self.path} must return one number, the mean of the losses, as a tensor")
        count = len(targets) if targets.is_floating_point() else (targets != self.ignored).sum()
        return mean * count


def ignored_index(loss: LossSum) -> int:
    """The target over which a loss takes no mean."""
    return loss.ignored if isinstance(loss, OwnLoss) else IGNORED


def ignored_by(mean: Any, classes: int, path: str) -> int:
    """Which target a user's loss leaves out of its mean (`ignore_index`): what it says itself, or what trials show.

    Ranks and micro-batches are weighted by the number of targets that count: with another target left out than we
    think, every weight would be wrong in silence. A loss that is no mean, but a sum, is refused.
    """
    said = getattr(mean, "ignore_index", None)
    if isinstance(said, int):
        return said
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, classes), (4, 2, classes), (4, classes, 2), (4, classes, 2, 2))
    for shape, is_object in product(shapes, (False, True)):
        logits = torch.randn(shape, generator=generator)
        rest = (shape[1],) if shape == shapes[1] else shape[2:]
        targets = torch.ones(4, *rest, dtype=torch.long)

        def tried(rows: slice, targets: Tensor, logits: Tensor = logits, is_object: bool = is_object) -> float:
            outputs: Any = SimpleNamespace(logits=logits[rows]) if is_object else logits[rows]
            return float(mean(outputs, targets[rows]))

        try:
            whole, halves = tried(slice(0, 4), targets), [tried(slice(i, i + 2), targets) for i in (0, 2)]
        except Exception:  # of the user's code: it wants outputs of another shape, or an object
            continue
        if whole and isclose(whole, sum(halves), rel_tol=1e-5):
            raise UserError(f"train.loss {path} returns the sum of the losses, and must return their mean")
        for target in dict.fromkeys((IGNORED, 0, 2, 3, classes - 1, classes, -1, 255)):
            targets[2:] = target
            with suppress(Exception):  # a target that is no class, and is not left out either
                if isclose(tried(slice(0, 4), targets), halves[0], rel_tol=1e-6):
                    return target
        return IGNORED
    return IGNORED


def logits_of(outputs: Any) -> Any:
    """Of a model that returns an object (`.logits`), a dict of them, or a tuple that begins with them."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    if hasattr(outputs, "logits"):
        return outputs.logits
    if isinstance(outputs, tuple | list) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    return None


def class_last(outputs: Tensor, targets: Tensor) -> Tensor:
    """(N, ..., C) of outputs in either order: torch's (N, C, ...) as well, where only that fits the targets."""
    if fits_last(outputs, targets) or not fits_second(outputs, targets):
        return outputs
    return outputs.movedim(1, -1)


def fits_last(outputs: Tensor, targets: Tensor) -> bool:
    return outputs.shape[:-1] == targets.shape


def fits_second(outputs: Tensor, targets: Tensor) -> bool:
    return outputs.dim() > 2 and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape)


def with_correct_count(loss: LossSum) -> Measure:
    """(outputs, targets) -> (sum of losses, correct predictions): one function, so that it can be compiled as one.

    The loss is taken in fp32 or better, whatever the outputs come in. A user's loss is given what the model returns.
    """

    def measure(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits_of(outputs)
        if isinstance(logits, Tensor) and not targets.is_floating_point():
            logits = class_last(logits, targets)
        if isinstance(loss, CrossEntropy) and logits.shape[-1] >= MANY_CLASSES and usable_on(logits):
            return fused_cross_entropy(logits, targets, loss.z_loss)
        if isinstance(logits, Tensor) and logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
            outputs = outputs.float() if isinstance(outputs, Tensor) else outputs
        given = outputs if isinstance(loss, OwnLoss) else logits
        return loss(given, targets), correct_count(logits, targets)

    return measure


@uncompiled
def fused_cross_entropy(outputs: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Both by our own kernels."""
    from lockstep.models.kernels.cross_entropy import cross_entropy  # Triton is where GPUs are

    return cross_entropy(outputs.flatten(0, -2), targets.flatten(), IGNORED, z_loss)


def correct_count(logits: Tensor | None, targets: Tensor) -> Tensor:
    """How many targets the largest output names; NaN where outputs are no classes."""
    if logits is None or targets.is_floating_point() or not fits_last(logits, targets):
        return torch.full((), nan, device=targets.device)
    return (logits.detach().argmax(-1) == targets).sum()
