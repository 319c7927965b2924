"""How far apart two tensors are: what `lockstep verify` and `lockstep judge` both mean by a difference."""

from collections.abc import Iterable
from math import inf

from torch import Tensor

LEAST = 1e-30
"""Nothing is relative to less."""


def finite(size: float) -> float:
    """NaN compares with nothing; make it infinite."""
    return size if size == size else inf


def relative(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the expected tensor's norm where that exceeds 1. NaN counts as infinite."""
    difference = float((got - expected).abs().max()) if expected.numel() else 0.0
    return finite(difference / max(1.0, float(expected.norm())))


def distance(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference. NaN counts as infinite."""
    return finite(float((got.reshape(-1) - expected.reshape(-1)).norm()))


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Of all together."""
    return sum(float(tensor.double().norm()) ** 2 for tensor in tensors) ** 0.5


def scale_of(tensor: Tensor, total: float, floor: float) -> float:
    """What a difference of one tensor is relative to: its own norm, or, where that is no more than rounding, a share
    (`floor`) of the norm of all.
    """
    return max(float(tensor.double().norm()), floor * total, LEAST)


def one_factor(got: Tensor, expected: Tensor, tolerance: float = 1e-6) -> float | None:
    """What `expected` must be multiplied by to give `got`, if a number does."""
    square = float((expected * expected).sum())
    factor = float((got * expected).sum()) / square if square else 0.0
    off = float((got - factor * expected).norm()) if got.numel() else inf
    return factor if off <= tolerance * max(abs(factor), 1.0) * max(square**0.5, LEAST) else None
