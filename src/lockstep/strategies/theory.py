"""What closed forms of traffic are made of: the numbers that the ledger's counts are held against, per rank and step.

Ψ is the number of trainable elements, n the number of ranks. An all-reduce of S bytes costs each rank 2S(n-1)/n on the
wire, an all-gather to S bytes and a reduce-scatter of S bytes S(n-1)/n. Each engine has its own closed form on its
class (`Engine.traffic`), for one dtype, no buffers, and every parameter used.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import nn

from lockstep.comm.ledger import Traffic
from lockstep.models.blocks import blocks_of

Shape = tuple[int, ...]


@dataclass
class Theory:
    """What one rank sends in one step by theory."""

    collectives: int | None
    """None: the engine decides, and only the bytes are held to theory."""
    wire_bytes: float

    def matches(self, counted: Traffic) -> bool:
        same_count = self.collectives is None or self.collectives == counted.collectives
        return same_count and abs(self.wire_bytes - counted.wire_bytes) < 0.5


NOTHING = Theory(0, 0.0)


def added(theories: Iterable[Theory | None]) -> Theory | None:
    """Of several axes together; None where one of them has no closed form."""
    found = list(theories)
    known = [theory for theory in found if theory is not None]
    if len(known) < len(found):
        return None
    counts = [theory.collectives for theory in known if theory.collectives is not None]
    return Theory(sum(counts) if len(counts) == len(known) else None, sum(theory.wire_bytes for theory in known))


@dataclass
class ModelSizes:
    """What a closed form needs to know of a model."""

    shapes: list[Shape]
    """Of every trainable parameter, in order."""
    blocks: list[list[Shape]]
    """Of each block's parameters."""
    outside: list[Shape]
    """Of the parameters outside all blocks."""
    itemsize: int
    """Bytes of an element of a parameter."""
    gathered: int
    """Of a parameter that is all-gathered to compute with."""
    reduced: int
    """Of a gradient that is computed in another dtype than the parameter's, when it is reduced."""

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


def all_reduce_factor(n: int) -> float:
    """Bytes on the wire per byte of payload."""
    return 2 * (n - 1) / n


def gather_factor(n: int) -> float:
    return (n - 1) / n


def bucket_sizes(sizes: list[int], itemsize: int, bucket_mb: float, first_share: float = 1.0) -> list[list[int]]:
    """Elements of each parameter of each bucket: filled from the last parameter on, closed when the cap is reached."""
    cap = bucket_mb * 1024 * 1024 / itemsize
    buckets: list[list[int]] = [[]]
    for size in reversed(sizes):
        buckets[-1].append(size)
        if sum(buckets[-1]) >= (cap * first_share if len(buckets) == 1 else cap):
            buckets.append([])
    return [b for b in buckets if b]


def padded(sizes: list[int], itemsize: int, n: int) -> int:
    """Elements of tensors laid end to end, each begun at a multiple of 16 bytes, all filled up to n equal parts."""
    align, end = max(1, 16 // itemsize), 0
    for size in sizes:
        end = ceil(end / align) * align + size
    return ceil(end / n) * n
