"""Which rows or columns of a matrix are a rank's."""

from dataclasses import dataclass

from torch import nn

from lockstep.errors import UserError
from lockstep.layout.group import Group

Range = tuple[int, int]


@dataclass(frozen=True)
class Shared:
    """A part has fewer units than there are ranks: several ranks have the same one."""

    index: int
    """Of this rank's unit."""
    count: int
    """Of units."""


@dataclass(frozen=True)
class Cut:
    """This rank's ranges of a dimension; a fused layer has one range per part."""

    ranges: tuple[Range, ...]
    sizes: list[int]
    """The size on each rank, over all parts."""
    shared: tuple[Shared | None, ...] = ()
    """One per part; empty where no two ranks have the same rows."""

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.ranges)


def even_cut(length: int, group: Group, uneven: bool = False) -> Cut:
    """Equal parts. `uneven`: if the length does not divide, the last ranks have less (a vocabulary of any size)."""
    if length % group.size and not uneven:
        raise UserError(f"{length} features cannot be cut into {group.size} equal parts")
    part = -(-length // group.size)
    bounds = [(min(r * part, length), min((r + 1) * part, length)) for r in range(group.size)]
    return Cut((bounds[group.rank],), [stop - start for start, stop in bounds])


def fused_cut(linear: nn.Linear, group: Group) -> Cut:
    """An equal share of each of the layer's `parts`, in whole `heads` where it has heads. There may be fewer key and
    value heads than ranks: then neighbouring ranks have the same one.
    """
    widths: tuple[int, ...] = getattr(linear, "parts", (linear.out_features,))
    heads: tuple[int, ...] = getattr(linear, "heads", widths)
    ranges: list[Range] = []
    shared: list[Shared | None] = []
    begin, ranks = 0, group.size
    for width, count in zip(widths, heads, strict=True):
        unit = width // count
        if count % ranks and ranks % count:
            what = "output features" if unit == 1 else "heads"
            raise UserError(f"{count} {what} cannot be cut into {ranks} equal parts")
        first = group.rank * count // ranks
        ranges.append((begin + first * unit, begin + (first + max(1, count // ranks)) * unit))
        shared.append(Shared(first, count) if count < ranks else None)
        begin += width
    size = sum(stop - start for start, stop in ranges)
    return Cut(tuple(ranges), [size] * ranks, tuple(shared) if any(shared) else ())
