"""What a law of traffic needs to know of a model."""

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from lockstep.models.blocks import blocks_of
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

    @classmethod
    def of(cls, model: nn.Module, compute: torch.dtype | None = None, reduce: str = "fp32") -> "ModelSizes":
        """`compute`: what forward and backward compute in, where it is not the parameters' dtype."""
        itemsize = next(model.parameters()).element_size()
        blocks = [block for _, block in blocks_of(model)]
        inside = {p for block in blocks for p in block.parameters()}
        gathered = itemsize if compute is None else compute.itemsize
        return cls(
            shapes=[tuple(p.shape) for p in model.parameters() if p.requires_grad],
            blocks=[[tuple(p.shape) for p in block.parameters()] for block in blocks],
            outside=[tuple(p.shape) for p in model.parameters() if p not in inside],
            itemsize=itemsize,
            gathered=gathered,
            reduced=4 if compute is not None and reduce == "fp32" else gathered,
        )

    @property
    def sizes(self) -> list[int]:
        return [prod(shape) for shape in self.shapes]

    @property
    def psi(self) -> int:
        return sum(self.sizes)
