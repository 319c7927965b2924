"""A region of a tensor in the form in which torch.distributed.checkpoint takes it, and gives it back.

A checkpoint knows nothing of who held what: every tensor in it has its whole shape, and is made of boxes (an offset and
a size in each dimension), which is what a region is. A rank that loads asks for the boxes that it needs, in whatever
layout it has by then.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.layout import Held

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class TensorPiece(torch.Tensor):
    """A tensor to DCP's planner, and only a description to all other code: one cannot compute with it."""

    @staticmethod
    def __new__(cls, held: Held, to_save: bool = False) -> "TensorPiece":
        piece: TensorPiece = torch.Tensor._make_wrapper_subclass(
            cls, held.region.shape, dtype=held.tensor.dtype, device=held.tensor.device
        )
        return piece

    def __init__(self, held: Held, to_save: bool = False) -> None:
        self.elements = held.tensor
        boxes = held.answers_for if to_save and held.answers_for is not None else held.region.boxes
        self._boxes = {torch.Size(box.offsets): held.region.view(held.tensor, box) for box in boxes}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"a piece of a tensor is for checkpoints; {func} would need its elements")

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
