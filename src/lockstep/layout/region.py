"""A region: what a rank holds of a named tensor of the whole model, as a list of boxes.

    elements 5 to 17 of a 4 x 6 tensor     rows 1 and 2 of a 4 x 6 tensor     the same of q, k and v in one 6 x 3
    (ZeRO: row-major, 3 boxes)             (a slice of a dimension, 1 box)    (tensor parallel, fused, 3 boxes)

         . . . . . 1                            . . . . . .                        1 1 1
         2 2 2 2 2 2                            1 1 1 1 1 1                        . . .
         3 3 3 3 3 .                            1 1 1 1 1 1                        2 2 2
         . . . . . .                            . . . . . .                        . . .
                                                                                   3 3 3
                                                                                   . . .

The rank's own memory has the boxes' elements one box after the other, each in row-major order. So a range of that
memory is again a region of the whole tensor (`part`), which is how two ways of cutting compose: ZeRO-3 of what tensor
parallelism has left.

Checkpoints, the gradient's norm, `verify` and the account of memory all derive from regions.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Sizes = tuple[int, ...]
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Box:
    """Offsets and sizes, one per dimension."""

    offsets: Sizes
    sizes: Sizes

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def part(self, start: int, stop: int) -> "list[Box]":
        """The fewest boxes that cover elements `start` to `stop` of this one, row-major, in order."""
        found = _boxes(self.sizes, start, stop)
        return [Box(tuple(a + b for a, b in zip(self.offsets, box.offsets, strict=True)), box.sizes) for box in found]

    def common(self, other: "Box") -> "Box | None":
        """What both have."""
        offsets = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        sizes = tuple(min(a + m, b + n) - o for o, (a, m, b, n) in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def minus(self, other: "Box") -> "list[Box]":
        """What this one has and the other has not: before it and behind it, one dimension after the other."""
        common = self.common(other)
        if common is None:
            return [self]
        left: list[Box] = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for d, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
            end = offsets[d] + sizes[d]
            for first, last in ((offsets[d], start), (start + size, end)):
                if first < last:
                    left.append(
                        Box((*offsets[:d], first, *offsets[d + 1 :]), (*sizes[:d], last - first, *sizes[d + 1 :]))
                    )
            offsets[d], sizes[d] = start, size
        return left


@dataclass(frozen=True)
class Region:
    """Boxes of a tensor of `shape`."""

    shape: Sizes
    boxes: tuple[Box, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> "Region":
        sizes = tuple(shape)
        return cls(sizes, (Box((0,) * len(sizes), sizes),))

    @classmethod
    def slice(cls, shape: Iterable[int], dim: int, *ranges: tuple[int, int]) -> "Region":
        """`start` to `stop` of one dimension, everything of the others; of a fused tensor, several of them."""
        sizes = tuple(shape)
        boxes = []
        for start, stop in ranges:
            offsets = tuple(start if d == dim else 0 for d in range(len(sizes)))
            boxes.append(Box(offsets, tuple(stop - start if d == dim else s for d, s in enumerate(sizes))))
        return cls(sizes, tuple(box for box in boxes if box.numel))

    @property
    def numel(self) -> int:
        return sum(box.numel for box in self.boxes)

    @property
    def is_whole(self) -> bool:
        return self == Region.whole(self.shape)

    @property
    def held_shape(self) -> Sizes:
        """Of a rank's own tensor: its box, or several boxes one below the other."""
        if len(self.boxes) == 1:
            return self.boxes[0].sizes
        rows = sum(box.sizes[0] for box in self.boxes)
        return (rows, *(self.boxes[0].sizes if self.boxes else self.shape)[1:])

    def part(self, start: int, stop: int) -> "Region":
        """Elements `start` to `stop` of what this region holds, in the order of its memory."""
        found: list[Box] = []
        begin = 0
        for box in self.boxes:
            first, last = max(start - begin, 0), min(stop - begin, box.numel)
            if first < last:
                found += box.part(first, last)
            begin += box.numel
        return Region(self.shape, tuple(found))

    def within(self, inner: "Region") -> "Region":
        """What `inner`, a region of what this one holds, is of the whole tensor: all of it, or some of its rows."""
        if inner.is_whole:
            return self
        row = prod(inner.shape[1:])
        if not inner.boxes:
            return self.part(0, 0)
        (box,) = inner.boxes
        assert box.sizes[1:] == inner.shape[1:], "rows are whole"
        return self.part(box.offsets[0] * row, (box.offsets[0] + box.sizes[0]) * row)

    def read(self, whole: Tensor) -> Tensor:
        """This region's elements of the whole tensor: one row, in the order of its memory."""
        if self.is_whole:
            return whole.reshape(-1)
        parts = [whole[box.slices].reshape(-1) for box in self.boxes]
        return torch.cat(parts) if parts else whole.new_empty(0)

    def write(self, whole: Tensor, held: Tensor) -> None:
        """Put what is held into its place in the whole tensor."""
        for box, part in zip(self.boxes, self.views(held), strict=True):
            whole[box.slices].copy_(part)

    def minus(self, others: "Iterable[Region]") -> tuple[Box, ...]:
        """What none of the others has."""
        left = list(self.boxes)
        for other in others:
            if other == self:
                return ()
            for theirs in other.boxes:
                left = [box for mine in left for box in mine.minus(theirs)]
        return tuple(left)

    def view(self, held: Tensor, box: Box) -> Tensor:
        """A box that lies in one of this region's, of the rank's own memory."""
        for mine, part in zip(self.boxes, self.views(held), strict=True):
            if mine.common(box) == box:
                return part[Box(tuple(a - b for a, b in zip(box.offsets, mine.offsets, strict=True)), box.sizes).slices]
        raise AssertionError(f"{box} is in none of {self.boxes}")

    def views(self, held: Tensor) -> list[Tensor]:
        """Each box of the rank's own memory, in its shape."""
        row = held.reshape(-1)
        parts = row.split([box.numel for box in self.boxes])
        return [part.view(box.sizes) for part, box in zip(parts, self.boxes, strict=True)]


def _boxes(shape: Sizes, start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,))] if shape else [Box((), ())]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # all within one row
        return _in_row(shape, start // row, start % row, stop - start // row * row)
    found = []
    if start % row:
        found += _in_row(shape, start // row, start % row, row)
    if first < last:
        found.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if stop % row:
        found += _in_row(shape, last, 0, stop % row)
    return found


def _in_row(shape: Sizes, index: int, start: int, stop: int) -> list[Box]:
    return [Box((index, *box.offsets), (1, *box.sizes)) for box in _boxes(shape[1:], start, stop)]


def uncovered(regions: Iterable[Region], shape: Sizes) -> int:
    """Elements of a tensor of `shape` that no region has."""
    seen = torch.zeros(shape, dtype=torch.bool)
    for region in regions:
        for box in region.boxes:
            seen[box.slices] = True
    return seen.numel() - int(seen.sum())


@dataclass(frozen=True)
class Held:
    """A rank's own memory of a named tensor, and which region of the whole it is."""

    parameter: Tensor
    """Also the key of its state in an optimizer."""
    region: Region
    answers_for: tuple[Box, ...] | None = None
    """What this rank saves of it, where ranks hold overlapping boxes; None: all of it, as do others with the same."""

    @property
    def tensor(self) -> Tensor:
        """The memory, as a plain tensor."""
        return local(self.parameter)

    def like(self, tensor: Tensor) -> "Held | Tensor":
        """Something of this parameter's: its gradient, or what an optimizer has for each of its elements. What has
        another shape (a step count) is no region of anything.
        """
        mine = local(tensor)
        return replace(self, parameter=mine) if mine.shape == self.tensor.shape else mine


def is_dtensor(tensor: Any) -> bool:
    """DTensor takes long to import."""
    return hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """What this rank holds of a DTensor; a plain tensor as it is."""
    found: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return found.detach()


def held_as(parameter: Tensor, region: Region) -> nn.Parameter:
    """A parameter of its own with only this region's elements, that says so (`region_of`)."""
    held = region.read(parameter.detach()).clone().view(region.held_shape)
    mine = nn.Parameter(held, parameter.requires_grad)
    mine.region = region  # type: ignore[attr-defined]
    return mine


def copied_with_regions(module: Module, memo: dict[int, Any]) -> Module:
    """A deep copy, whose parameters keep what has been noted of them: torch copies only a parameter's data."""
    other = type(module).__new__(type(module))
    memo[id(module)] = other
    other.__dict__.update(copy.deepcopy(module.__dict__, memo))
    for name, parameter in module.named_parameters(recurse=False):
        other.get_parameter(name).__dict__.update(parameter.__dict__)
    return other


def region_of(tensor: Any) -> Region:
    """The region that a wrapper has noted (`held_as`), or that a DTensor states; any other tensor is whole."""
    said: Region | None = getattr(tensor, "region", None)
    if said is not None or not is_dtensor(tensor):
        return said or Region.whole(tensor.shape)
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.__create_chunk_list__()]
    return Region(tuple(tensor.shape), tuple(box for box in boxes if box.numel))
