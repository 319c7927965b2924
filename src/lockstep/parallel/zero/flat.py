"""Tensors laid end to end and cut into equal parts, one per rank: the layout of everything that is sharded.

    tensors   [ p0      | p1 | p2            | padding ]
    parts     [ rank 0       | rank 1        | rank 2  ]

The cut goes through the elements, not between tensors, so that all ranks hold the same number of bytes. What a rank
holds of one tensor is a piece: a 1-D slice of its elements, perhaps all of them, perhaps none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.collectives import all_gather_into_async
from lockstep.layout.group import GroupLike

ALIGNMENT = 16
"""Bytes. Tensors begin at a multiple of it: matrix units read misaligned ones slowly, or not at all."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one tensor."""

    index: int
    """Which tensor."""
    inside: slice
    """Which of the tensor's elements, in row-major order."""
    at: slice
    """Where they lie in the rank's part."""


def dense(gradient: Tensor) -> Tensor:
    """A gradient as a dense tensor, to be copied into a buffer: an embedding's may be sparse."""
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


class FlatLayout:
    """Where each of some tensors lies when they are laid end to end and cut into `parts` equal parts."""

    def __init__(self, tensors: Sequence[Tensor], parts: int, itemsize: int | None = None) -> None:
        self.shapes = [t.shape for t in tensors]
        align = max(1, ALIGNMENT // (itemsize or tensors[0].itemsize))
        self.starts: list[int] = []
        end = 0
        for tensor in tensors:
            self.starts.append(-(-end // align) * align)
            end = self.starts[-1] + tensor.numel()
        self.parts = parts
        self.part_length = -(-end // parts)
        self.length = self.part_length * parts

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each tensor in its own shape, as a view of `flat`."""
        return [self.view(flat, index) for index in range(len(self.shapes))]

    def view(self, flat: Tensor, index: int) -> Tensor:
        start, shape = self.starts[index], self.shapes[index]
        return flat[start : start + shape.numel()].view(shape)

    def part(self, flat: Tensor, rank: int) -> Tensor:
        return flat[rank * self.part_length : (rank + 1) * self.part_length]

    def pieces(self, rank: int) -> list[Piece]:
        """The pieces that `rank` holds; none of a tensor that it holds nothing of."""
        low, high = rank * self.part_length, (rank + 1) * self.part_length
        found = []
        for index, (start, shape) in enumerate(zip(self.starts, self.shapes, strict=True)):
            first, last = max(low, start), min(high, start + shape.numel())
            if first < last:
                found.append(Piece(index, slice(first - start, last - start), slice(first - low, last - low)))
        return found

    @torch.no_grad()
    def fill(self, flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy the tensors into `flat`; returns their views."""
        views = self.views(flat)
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
        return views

    def gathered(self, part: Tensor, group: GroupLike = None) -> list[Tensor]:
        """Every tensor whole, put together from all ranks' parts. Every rank must call it."""
        flat = part.new_empty(self.length)
        all_gather_into_async(flat, part.detach().contiguous(), group, purpose="check").wait()
        return self.views(flat)
