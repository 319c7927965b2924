"""How ranks that have trained apart average: all together or in pairs, every number or the largest, in few bits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.collectives import all_reduce_async, exchange_async
from lockstep.errors import UserError
from lockstep.layout.group import Group
from lockstep.parallel.data import law
from lockstep.parallel.data.few_bits import sum_in_few_bits, sum_of_largest
from lockstep.parallel.law import Sent, all_reduce, message

PURPOSE = "parameters"


@dataclass(frozen=True)
class Exchange:
    """What travels of an array."""

    bits: int = 32
    """Of each number."""
    density: float = 1.0
    """The share of its numbers, the largest."""
    gossip: bool = False
    """To one other rank, which is another one each time."""

    def __post_init__(self) -> None:
        if self.bits not in (32, 8, 4, 2, 1):
            raise UserError(f"bits is {self.bits}, but it must be 32, 8, 4, 2 or 1")
        if not 0 < self.density <= 1:
            raise UserError(f"density is {self.density}, but it must be above 0 and at most 1")
        if self.gossip and self.keeps:
            raise UserError("ranks that average in pairs send all of it: leave bits and density out, or gossip")

    @property
    def keeps(self) -> bool:
        """Not all of it is sent, and the rest is kept for the next time."""
        return self.bits < 32 or self.density < 1

    def begin(self, flat: Tensor, group: Group, number: int) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """The returned function waits; it gives the mean, and this rank's share of what was not sent. `number`: how
        many averages there were before, which decides who meets whom.
        """
        if group.size == 1:
            return lambda: (flat, None)
        if self.gossip:
            return with_partner(flat, group, number)
        flat = flat / group.size
        if self.density < 1:
            return sum_of_largest(flat, self.density, self.bits, group, PURPOSE)
        if self.bits < 32:
            return sum_in_few_bits(flat, self.bits, group, PURPOSE)
        pending = all_reduce_async(flat, group=group, purpose=PURPOSE)

        def finish() -> tuple[Tensor, None]:
            pending.wait()
            return flat, None

        return finish

    def sent(self, elements: int, itemsize: int, n: int) -> Sent:
        """By theory, of one array."""
        if self.gossip:
            return message(elements * itemsize)
        if self.density < 1:
            return law.largest(elements, self.density, self.bits, itemsize, n)
        if self.bits < 32:
            return law.few_bits(elements, self.bits, n)
        return all_reduce(elements * itemsize, n)


def with_partner(flat: Tensor, group: Group, number: int) -> Callable[[], tuple[Tensor, None]]:
    """The mean of two; of an odd number of ranks one keeps its own."""
    partner = partners(group.size, number)[group.rank]
    if partner == group.rank:
        return lambda: (flat, None)
    theirs = torch.empty_like(flat)
    pending = exchange_async([(flat, partner)], [(theirs, partner)], group, purpose=PURPOSE)

    def finish() -> tuple[Tensor, None]:
        pending.wait()
        return (flat + theirs).div_(2), None

    return finish


def partners(ranks: int, number: int) -> list[int]:
    """Of each rank, the same on all ranks."""
    order = torch.randperm(ranks, generator=torch.Generator().manual_seed(number)).tolist()
    found = list(range(ranks))
    for a, b in zip(order[::2], order[1::2], strict=False):
        found[a], found[b] = b, a
    return found
