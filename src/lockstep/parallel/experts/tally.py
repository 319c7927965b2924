"""How often each expert is chosen, added up over ranks: what a balance of the global batch needs."""

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_async, all_reduce, all_reduce_async
from lockstep.layout.group import Group
from lockstep.models.balance import Tallied, Tally
from lockstep.models.experts import NO_CHOICE, mixtures_in


class RanksTally(Tally):
    """Counts of all ranks whose tokens are balanced together."""

    def __init__(self, groups: tuple[Group, ...], always_tallies: bool = False) -> None:
        """`groups`: together they join these ranks, each with those that differ from it along one axis.

        `always_tallies`: also where the load is only for the caller to see.
        """
        super().__init__()
        self.groups, self.always_tallies = groups, always_tallies
        self.taken: Tensor | None = None
        """This rank's choices of each expert in training, until they are read."""
        self.dropped = NO_CHOICE
        """Of them, by capacity."""

    def __deepcopy__(self, _: object) -> "RanksTally":
        """A copy of a mixture communicates with the same ranks, and has counts of its own."""
        other = RanksTally(self.groups, self.always_tallies)
        other.averaged_over = self.averaged_over
        return other

    def begin(self, counts: Tensor, needs_load: bool, needs_earlier: bool) -> Tallied:
        if needs_earlier:
            (group,) = self.groups
            return TalliedByRank(counts, group)
        return TalliedOver(counts, self.groups) if needs_load or self.always_tallies else Tallied(counts)

    def passed(self, counts: Tensor, dropped: Tensor) -> None:
        if torch.is_grad_enabled():
            self.taken = counts.clone() if self.taken is None else self.taken + counts
            self.dropped = dropped + self.dropped

    def taken_since(self) -> tuple[list[int], int]:
        """(this rank's choices of each expert in training since this was last asked, how many of them were dropped)."""
        taken, dropped = self.taken, int(self.dropped)
        self.taken, self.dropped = None, NO_CHOICE
        return ([] if taken is None else taken.tolist()), dropped

    def total(self, counts: Tensor) -> Tensor:
        counts = counts.clone()
        for group in self.groups:
            counts = all_reduce(counts, group=group, purpose="count")
        return counts


class TalliedOver(Tallied):
    """Counts summed over ranks, in flight until they are read."""

    def __init__(self, counts: Tensor, groups: tuple[Group, ...]) -> None:
        super().__init__(counts.clone())
        self._pending = all_reduce_async(self.counts, group=groups[0], purpose="count")
        self._later = groups[1:]

    @property
    def load(self) -> Tensor:
        self._pending.wait()
        for group in self._later:
            self.counts = all_reduce(self.counts, group=group, purpose="count")
        self._later = ()
        return self.counts


class TalliedByRank(Tallied):
    """Of each rank."""

    def __init__(self, counts: Tensor, group: Group) -> None:
        super().__init__(counts)
        self._table, self._pending = all_gather_async(counts, group, purpose="count")
        self._rank = group.rank

    @property
    def load(self) -> Tensor:
        self._pending.wait()
        return self._table.sum(0)

    @property
    def earlier(self) -> Tensor:
        self._pending.wait()
        return self._table[: self._rank].sum(0)


def tally_over(module: nn.Module, group: Group) -> None:
    """Experts that every rank holds, in a module whose gradients are averaged over the group: their balance is that of
    all ranks' tokens, and so is their capacity.
    """
    for mixture in mixtures_in(module).values() if group.size > 1 else ():
        if type(mixture.tally) is Tally:
            mixture.tally = RanksTally((group,), always_tallies=True)
            mixture.tally.averaged_over = group.size
