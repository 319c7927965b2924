"""What communication costs by theory. A law is a sum of collectives, each with the bytes that one rank sends for it.

An all-reduce of S bytes over n ranks sends 2S(n-1)/n, an all-gather to S bytes and a reduce-scatter of S bytes S(n-1)/n
each. Every mechanism has its own `law.py`: what a step sends, and what a rank holds. `verify` compares the ledger's
counts with these, and the planner multiplies the same terms by seconds. Numbers only: no tensors, no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.comm.ledger import Traffic

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """What one rank sends in one step."""

    collectives: int | None = 0
    """None: the engine decides, and only the bytes are a law."""
    wire_bytes: float = 0.0

    def __add__(self, other: "Sent") -> "Sent":
        counted = self.collectives is not None and other.collectives is not None
        return Sent(self.collectives + other.collectives if counted else None, self.wire_bytes + other.wire_bytes)  # type: ignore[operator]

    def __mul__(self, times: int) -> "Sent":
        return Sent(None if self.collectives is None else self.collectives * times, self.wire_bytes * times)

    def in_pieces(self, pieces: int | None) -> "Sent":
        """The same bytes in more calls; None: it is not known in how many."""
        return Sent(None if pieces is None or self.collectives is None else self.collectives * pieces, self.wire_bytes)

    def matches(self, counted: "Traffic") -> bool:
        same_count = self.collectives is None or self.collectives == counted.collectives
        return same_count and abs(self.wire_bytes - counted.wire_bytes) < 0.5


NOTHING = Sent()


def added(laws: Iterable[Sent | None]) -> Sent | None:
    """The sum of several axes; None where one of them has no closed form."""
    total = NOTHING
    for law in laws:
        if law is None:
            return None
        total += law
    return total


def gather_factor(n: int) -> float:
    """Bytes on the wire for each byte of the whole array."""
    return (n - 1) / n


def all_reduce_factor(n: int) -> float:
    return 2 * gather_factor(n)


def all_reduce(nbytes: float, n: int) -> Sent:
    return Sent(1, all_reduce_factor(n) * nbytes)


def all_gather(nbytes: float, n: int) -> Sent:
    """`nbytes`: of the whole array."""
    return Sent(1, gather_factor(n) * nbytes)


reduce_scatter = all_to_all = all_gather
"""The same bytes."""


def message(nbytes: float) -> Sent:
    return Sent(1, float(nbytes))
