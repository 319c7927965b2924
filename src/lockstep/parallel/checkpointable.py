"""A piece of a tensor in the form in which torch.distributed.checkpoint takes it, and gives it back.

A checkpoint knows nothing of who held what: every tensor in it has its whole shape, and is made of boxes (an offset and
a size in each dimension). A piece is a range of a tensor's elements in row-major order, which is several boxes:

    elements 5 to 17 of a 4 x 6 tensor        . . . . . 1
                                              2 2 2 2 2 2
                                              3 3 3 3 3 .
                                              . . . . . .

Whoever loads asks for the boxes that it needs, in whatever layout it has by then.
"""

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The fewest boxes that cover elements `start` to `stop`, row-major, in order."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,))] if shape else [((), ())]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # all within one row
        return _in_row(shape, start // row, start % row, stop - start // row * row)
    found = []
    if start % row:
        found += _in_row(shape, start // row, start % row, row)
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if stop % row:
        found += _in_row(shape, last, 0, stop % row)
    return found


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], start, stop)]


class TensorPiece(torch.Tensor):
    """Elements `start`, `start + 1`, ... of a tensor of `shape`: what `elements`, 1-D, holds of it.

    A tensor to whoever plans a checkpoint, and a description to everybody else: one cannot compute with it.
    """

    elements: Tensor
    start: int

    @staticmethod
    def __new__(cls, elements: Tensor, shape: tuple[int, ...], start: int) -> "TensorPiece":
        piece: TensorPiece = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=elements.dtype, device=elements.device
        )
        return piece

    def __init__(self, elements: Tensor, shape: tuple[int, ...], start: int) -> None:
        self.elements, self.start = elements, start
        self._boxes: dict[torch.Size, Tensor] = {}
        position = 0
        for offsets, sizes in boxes(tuple(shape), start, start + elements.numel()):
            count = prod(sizes)
            self._boxes[torch.Size(offsets)] = elements[position : position + count].view(sizes)
            position += count

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"a piece of a tensor is for checkpoints; {func} would need its elements")

    def copied(self) -> "TensorPiece":
        return TensorPiece(self.elements.detach().to("cpu", copy=True), self.shape, self.start)

    # What a planner calls. It has imported torch.distributed.checkpoint, which takes long; others need not.

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, part.shape) for offsets, part in self._boxes.items()]

    def __create_write_items__(self, fqn: str, _: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.elements)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> Tensor:
        assert index.offset is not None
        return self._boxes[index.offset]
