"""Arithmetic on intervals: times, or addresses."""

from collections.abc import Iterable
from math import inf


def covered(intervals: Iterable[tuple[float, float]], begin: float = -inf, end: float = inf) -> float:
    """How much of what lies between `begin` and `end` some interval covers; what several cover counts once."""
    total, reached = 0.0, begin
    for start, stop in sorted(intervals):
        total += max(0.0, min(stop, end) - max(start, reached))
        reached = max(reached, stop)
    return total
