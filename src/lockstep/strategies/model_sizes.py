"""What a law of traffic needs to know of a model."""

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from lockstep.layout import Group
from lockstep.models.blocks import blocks_of
from lockstep.parallel.data.law import bucket_sizes, buckets_by_kind
from lockstep.parallel.law import Shape


@dataclass
class ModelSizes:
    """Shapes of the parameters, and bytes of an element."""

    shapes: list[Shape]
    """Of every trainable parameter, in order."""
    blocks: list[list[Shape]]
    """Of each block's parameters."""
    outside: list[Shape]
    """Of the parameters outside all blocks."""
    itemsize: int
    """Bytes of an element of a parameter."""
    gathered: int
    """Bytes of an element of a parameter when it is all-gathered."""
    reduced: int
    """Bytes of an element of a gradient when it is reduced, if it is computed in another dtype than the parameter's."""
    parts: "dict[int, ModelSizes]" = field(default_factory=dict)
    """Parameters of which another number of ranks hold copies (experts), by that number."""
    kind: int | None = None
    """Of a part: that number."""
    order: list[tuple[int, object]] = field(default_factory=list)
    """(elements, kind) of every trained parameter of the model, where it has parts."""

    @classmethod
    def of(cls, model: nn.Module, compute: torch.dtype | None = None, reduce: str = "fp32") -> "ModelSizes":
        """`compute`: what forward and backward compute in, where it is not the parameters' dtype."""
        itemsize = next(model.parameters()).element_size()
        blocks = [block for _, block in blocks_of(model)]
        inside = {p for block in blocks for p in block.parameters()}
        gathered = itemsize if compute is None else compute.itemsize
        kinds = {p: copies_of(p) for p in model.parameters()}

        def part(kind: int | None) -> "ModelSizes":
            mine = [p for p, its in kinds.items() if its == kind]
            return cls(
                shapes=[tuple(p.shape) for p in mine if p.requires_grad],
                blocks=[[tuple(p.shape) for p in block.parameters() if kinds[p] == kind] for block in blocks],
                outside=[tuple(p.shape) for p in mine if p not in inside],
                itemsize=itemsize,
                gathered=gathered,
                reduced=4 if compute is not None and reduce == "fp32" else gathered,
                kind=kind,
            )

        found = part(None)
        found.parts = {kind: part(kind) for kind in set(kinds.values()) if kind is not None}
        if found.parts:
            order: list[tuple[int, object]] = [(p.numel(), kind) for p, kind in kinds.items() if p.requires_grad]
            for one in (found, *found.parts.values()):
                one.order = order
        return found

    def buckets(self, bucket_mb: float, first_share: float) -> list[list[int]]:
        """Elements of the parameters of each bucket."""
        if not self.order:
            return bucket_sizes(self.sizes, self.itemsize, bucket_mb, first_share)
        return buckets_by_kind(self.order, self.itemsize, bucket_mb, first_share).get(self.kind, [])

    @property
    def trained(self) -> int:
        """Parameters whose flags are sent together: those of all parts with those of the model."""
        return len(self.shapes) + sum(len(part.shapes) for part in self.parts.values()) if self.kind is None else 0

    @property
    def sizes(self) -> list[int]:
        return [prod(shape) for shape in self.shapes]

    @property
    def psi(self) -> int:
        return sum(self.sizes)


def copies_of(parameter: Tensor) -> int | None:
    """The number of ranks that hold the same, if it is not that of the rest of the model."""
    replicas: Group | None = getattr(parameter, "replicas", None)
    return None if replicas is None else replicas.size
