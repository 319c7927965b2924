"""Whole matrices of which ranks hold regions: what Muon's step needs under ZeRO, FSDP2 and tensor parallelism.

Each matrix has an owner, one of the ranks that hold some of it. In each step:

1. every rank sends the boxes that it holds of others' matrices to their owners: one all-to-all
2. the owners put their matrices together, and compute what takes a whole matrix
3. the owners send every holder its boxes of the result: one all-to-all back

A matrix that a rank holds whole is computed there, and sends nothing: all of them under data parallelism, most of them
under ZeRO 1 and 2. The owner is chosen once, by all ranks alike: the rank that holds most of the matrix, and of several
the one with the least to compute so far.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from lockstep.comm.collectives import all_gather_objects, all_to_all_async
from lockstep.layout.group import Group
from lockstep.layout.region import Box, Held, Region

AT_ONCE = 2**26
"""Elements of matrices of one shape that are computed together."""

Compute = Callable[[Tensor], Tensor]
"""(matrices, rows, columns) -> the same of each."""


@dataclass
class Matrix:
    """One matrix, or one of a stack of them."""

    name: str
    """Of the parameter."""
    box: Box
    """Of the parameter's tensor."""
    is_of_stack: bool
    holders: dict[Box, list[int]] = field(default_factory=dict)
    """What ranks hold of it -> which ranks do."""
    owner: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return rows_and_columns(self.box.sizes, self.is_of_stack)

    @property
    def cost(self) -> float:
        rows, columns = self.shape
        return float(rows) * columns * min(rows, columns)

    def sender(self, box: Box) -> int:
        """Who gives a box to the owner, who may have it."""
        ranks = self.holders[box]
        return self.owner if self.owner in ranks else ranks[0]

    def choose_owner(self, load: list[float]) -> None:
        """`load`: what each rank computes already."""
        held = [0] * len(load)
        for box, ranks in self.holders.items():
            for rank in ranks:
                held[rank] += box.numel
        self.owner = min((rank for rank, count in enumerate(held) if count == max(held)), key=lambda rank: load[rank])
        load[self.owner] += self.cost


def rows_and_columns(sizes: tuple[int, ...], is_of_stack: bool) -> tuple[int, int]:
    """Of a matrix, of one of a stack of them, or of a convolution's kernels, one a row."""
    sizes = sizes[1:] if is_of_stack else sizes
    return sizes[0], prod(sizes[1:])


def matrices_of(shape: tuple[int, ...], is_stack: bool) -> list[Box]:
    """The boxes of a tensor that are matrices: itself, or each of a stack."""
    if not is_stack:
        return [Box((0,) * len(shape), shape)]
    return [Box((i, *(0 for _ in shape[1:])), (1, *shape[1:])) for i in range(shape[0])]


class WholeMatrices:
    """Of all ranks of a group. They make it together, and each calls `compute` in every step."""

    def __init__(self, held: Mapping[str, Held], stacks: set[str], group: Group) -> None:
        """`held`: this rank's regions of the parameters that are matrices, or (in `stacks`) stacks of them."""
        self.group, self.regions = group, {name: h.region for name, h in held.items()}
        self.stacks = stacks
        self.local: list[Matrix] = []
        self.cut: list[Matrix] = []
        """In one order on all ranks: also those of which this rank holds nothing."""
        in_part: dict[str, Region] = {}
        for name, region in self.regions.items():
            found = [Matrix(name, box, name in stacks) for box in matrices_of(region.shape, name in stacks)]
            whole = [m for m in found if sum(box.numel for box in common(region, m.box)) == m.box.numel]
            self.local += whole
            if len(whole) < len(found):
                in_part[name] = region
        if group.size > 1:
            self._find_cut(all_gather_objects({name: (r, name in stacks) for name, r in in_part.items()}, group))
        self._plan()

    def _find_cut(self, everyone: list[dict[str, tuple[Region, bool]]]) -> None:
        mine = {(m.name, m.box) for m in self.local}
        found: dict[tuple[str, Box], Matrix] = {}
        for rank, theirs in enumerate(everyone):
            for name, (region, is_stack) in theirs.items():
                for whole in matrices_of(region.shape, is_stack):
                    for box in common(region, whole):
                        matrix = found.setdefault((name, whole), Matrix(name, whole, is_stack))
                        matrix.holders.setdefault(box, []).append(rank)
        load = [0.0] * self.group.size
        for key in sorted(found, key=lambda key: (key[0], key[1].offsets)):
            matrix = found[key]
            if all(box == matrix.box for box in matrix.holders):
                continue  # of a stack that is cut between its matrices
            assert key not in mine, "a matrix that some rank holds whole is cut on others"
            matrix.choose_owner(load)
            self.cut.append(matrix)

    def _plan(self) -> None:
        """How many elements go where."""
        me, size = self.group.rank, self.group.size
        self.owned = [m for m in self.cut if m.owner == me]
        self.to_owners, self.from_holders, self.to_holders, self.from_owners = ([0] * size for _ in range(4))
        for matrix in self.cut:
            for box, ranks in matrix.holders.items():
                sender = matrix.sender(box)
                if sender != matrix.owner:
                    self.to_owners[matrix.owner] += box.numel * (sender == me)
                    self.from_holders[sender] += box.numel * (matrix.owner == me)
                for rank in ranks:
                    if rank != matrix.owner:
                        self.to_holders[rank] += box.numel * (matrix.owner == me)
                        self.from_owners[matrix.owner] += box.numel * (rank == me)

    def compute(self, given: Mapping[str, Tensor], function: Compute, like: Tensor) -> dict[str, Tensor]:
        """Of each parameter this rank's memory, of `function` of the whole matrices. `given`: what is missing counts as
        zeros. `like`: an empty tensor of the dtype and device to compute on.
        """
        given = {name: tensor.to(like) for name, tensor in given.items()}
        results = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
        wholes = {id(m): self._read(given[m.name], m, m.box) for m in self.local if m.name in given}
        wholes |= self._to_owners(given, like)
        mine = [m for m in (*self.local, *self.owned) if id(m) in wholes]
        apply_by_shape(mine, wholes, function)
        for matrix in self.local:
            if matrix.name in results:
                self._write(results[matrix.name], matrix, matrix.box, wholes[id(matrix)])
        self._to_holders(wholes, results, like)
        return results

    def _to_owners(self, given: Mapping[str, Tensor], like: Tensor) -> dict[int, Tensor]:
        """The cut matrices that this rank owns, put together."""
        me = self.group.rank
        wholes = {id(m): like.new_zeros(m.box.sizes) for m in self.owned}
        sent: list[list[Tensor]] = [[] for _ in range(self.group.size)]
        for matrix in self.cut:
            for box in matrix.holders:
                if matrix.sender(box) != me:
                    continue
                has = matrix.name in given
                part = self._read(given[matrix.name], matrix, box) if has else like.new_zeros(box.sizes)
                if matrix.owner == me:
                    inside(wholes[id(matrix)], matrix.box, box).copy_(part)
                else:
                    sent[matrix.owner].append(part.reshape(-1))
        arrived = self._exchange(sent, self.to_owners, self.from_holders, like)
        for matrix in self.owned:
            for box in matrix.holders:
                if (sender := matrix.sender(box)) != me:
                    inside(wholes[id(matrix)], matrix.box, box).copy_(arrived[sender].take(box.numel).view(box.sizes))
        return wholes

    def _to_holders(self, wholes: Mapping[int, Tensor], results: Mapping[str, Tensor], like: Tensor) -> None:
        me = self.group.rank
        sent: list[list[Tensor]] = [[] for _ in range(self.group.size)]
        for matrix in self.owned:
            for box, ranks in matrix.holders.items():
                part = inside(wholes[id(matrix)], matrix.box, box)
                for rank in ranks:
                    if rank != me:
                        sent[rank].append(part.reshape(-1))
                    elif matrix.name in results:
                        self._write(results[matrix.name], matrix, box, part)
        arrived = self._exchange(sent, self.to_holders, self.from_owners, like)
        for matrix in self.cut:
            for box, ranks in matrix.holders.items():
                if me in ranks and matrix.owner != me:
                    part = arrived[matrix.owner].take(box.numel).view(box.sizes)
                    if matrix.name in results:
                        self._write(results[matrix.name], matrix, box, part)

    def _exchange(
        self, sent: list[list[Tensor]], counts: list[int], received: list[int], like: Tensor
    ) -> "list[Arrived]":
        if not self.cut:
            return []
        parts = [part for to_one in sent for part in to_one]
        row = torch.cat(parts) if parts else like.new_empty(0)
        arrived = like.new_empty(sum(received))
        all_to_all_async(arrived, row, self.group, received, counts, purpose="matrices").wait()
        return [Arrived(part) for part in arrived.split(received)]

    def _read(self, memory: Tensor, matrix: Matrix, box: Box) -> Tensor:
        """A box of a matrix, of this rank's memory."""
        return self._joined(memory, matrix, box).reshape(box.sizes)

    def _joined(self, memory: Tensor, matrix: Matrix, box: Box) -> Tensor:
        region = self.regions[matrix.name]
        parts = common(region, box)
        if parts == [box]:
            return region.view(memory, box)
        whole = memory.new_empty(box.sizes)
        for part in parts:
            inside(whole, box, part).copy_(region.view(memory, part))
        return whole

    def _write(self, memory: Tensor, matrix: Matrix, box: Box, values: Tensor) -> None:
        region = self.regions[matrix.name]
        for part in common(region, box):
            region.view(memory, part).copy_(inside(values, box, part))


@dataclass
class Arrived:
    """What one rank has sent, taken from its beginning."""

    row: Tensor
    taken: int = 0

    def take(self, count: int) -> Tensor:
        self.taken += count
        return self.row[self.taken - count : self.taken]


def common(region: Region, box: Box) -> list[Box]:
    """What a region has of a box."""
    found = (mine.common(box) for mine in region.boxes)
    return [part for part in found if part is not None]


def inside(whole: Tensor, box: Box, part: Box) -> Tensor:
    """A view of `part` in a tensor that is `box`."""
    return whole[Box(tuple(a - b for a, b in zip(part.offsets, box.offsets, strict=True)), part.sizes).slices]


def apply_by_shape(matrices: list[Matrix], wholes: dict[int, Tensor], function: Compute) -> None:
    """Replace each by what the function makes of it; those of one shape together."""
    alike: dict[tuple[int, int], list[Matrix]] = {}
    for matrix in matrices:
        alike.setdefault(matrix.shape, []).append(matrix)
    for (rows, columns), some in alike.items():
        count = max(1, AT_ONCE // max(1, rows * columns))
        for start in range(0, len(some), count):
            batch = some[start : start + count]
            found = function(torch.stack([wholes[id(m)].reshape(rows, columns) for m in batch]))
            for matrix, result in zip(batch, found, strict=True):
                wholes[id(matrix)] = result.reshape(matrix.box.sizes)
