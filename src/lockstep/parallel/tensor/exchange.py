"""Collectives with a backward, which is the opposite collective: tensor and sequence parallelism are built of them.

A tensor inside a cut model is, over the ranks of a group, one of three things:

    whole      the same on every rank
    cut        each rank has its part of one dimension
    summands   each rank has a term of a sum that no rank has

and a gradient's kind follows from how its tensor is used. Each function moves a tensor from one kind to another; its
backward moves the gradient the opposite way.

    function              forward                       backward                      why
    copy_to_ranks         whole, as it is               summands -> all-reduce        every rank uses x for its part of
                                                                                      the output: gradients add up
    reduce_from_ranks     summands -> all-reduce        whole, as it is               d(a + b) = da = db
    split_to_ranks        whole -> its own part         cut -> all-gather             no other rank has the gradient of
                                                                                      the other parts
    gather_from_ranks     cut -> all-gather             whole -> its own part         all compute the same from it
    gather_positions      cut -> all-gather             summands -> reduce-scatter    gathered, and then used by each
                                                                                      rank for its own outputs
    scatter_sums          summands -> reduce-scatter    cut -> all-gather             the opposite of gather_positions

An all-reduce is a reduce-scatter and an all-gather, so the last two send what `copy_to_ranks` and `reduce_from_ranks`
send; between them a rank holds only its part of the positions, and needs only the memory for a part.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.comm.collectives import all_gather_async, all_reduce, reduce_scatter_async
from lockstep.comm.pending import Pending
from lockstep.errors import UserError
from lockstep.layout.group import Group

PURPOSE = "activations"
"""What the ledger files it under."""


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """The identity; backward sums the gradient over the ranks."""
    return _CopyToRanks.apply(x, group) if group.size > 1 else x


def reduce_from_ranks(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks; backward leaves the gradient as it is."""
    return _ReduceFromRanks.apply(x, group) if group.size > 1 else x


def split_to_ranks(x: Tensor, group: Group, dim: int, sizes: list[int] | None = None) -> Tensor:
    """This rank's part of `dim`, of these sizes if parts differ; backward gathers the gradient."""
    return _SplitToRanks.apply(x, group, dim, sizes) if group.size > 1 else x


def gather_from_ranks(x: Tensor, group: Group, dim: int, sizes: list[int] | None = None) -> Tensor:
    """All ranks' parts of `dim`, of these sizes if they differ; backward takes this rank's part of the gradient."""
    return _GatherFromRanks.apply(x, group, dim, sizes) if group.size > 1 else x


def gather_positions(x: Tensor, group: Group, dim: int) -> Tensor:
    """All ranks' parts of `dim`; backward sums the gradient, and each rank keeps its part of it."""
    return _GatherPositions.apply(x, group, dim) if group.size > 1 else x


def scatter_sums(x: Tensor, group: Group, dim: int) -> Tensor:
    """Sum over the ranks, and each rank keeps its part of `dim`; backward gathers the gradient."""
    return _ScatterSums.apply(x, group, dim) if group.size > 1 else x


# ---- plain collectives along a dimension ---------------------------------------------------------------------------


def summed(x: Tensor, group: Group) -> Tensor:
    """A new tensor: the sum of `x` over all ranks."""
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group=group, purpose=PURPOSE)


def local_part(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's equal part of `dim`."""
    length = x.shape[dim]
    if length % group.size:
        raise UserError(f"{length} positions cannot be cut into {group.size} equal parts; give a multiple of them")
    return x.chunk(group.size, dim)[group.rank]


class Gathering:
    """An all-gather along a dimension, in flight."""

    def __init__(self, x: Tensor, group: Group, dim: int) -> None:
        self.dim = dim % x.dim()
        self._parts, self._pending = all_gather_async(x.contiguous(), group, purpose=PURPOSE)

    def wait(self) -> Tensor:
        self._pending.wait()
        return self._parts.movedim(0, self.dim).flatten(self.dim, self.dim + 1)


class Scattering:
    """A reduce-scatter along a dimension, in flight."""

    def __init__(self, x: Tensor, group: Group, dim: int) -> None:
        own = local_part(x, group, dim)
        self._sent = torch.stack(x.chunk(group.size, dim))  # (ranks, ..., part of dim, ...)
        self._own = torch.empty_like(own, memory_format=torch.contiguous_format)
        self._pending: Pending = reduce_scatter_async(self._own, self._sent, group=group, purpose=PURPOSE)

    def wait(self) -> Tensor:
        self._pending.wait()
        return self._own


def gathered(x: Tensor, group: Group, dim: int, sizes: list[int] | None = None) -> Tensor:
    """All ranks' parts of `dim`, end to end. Parts of different sizes are padded to the largest."""
    if sizes is None or len(set(sizes)) == 1:
        return Gathering(x, group, dim).wait()
    dim, longest = dim % x.dim(), max(sizes)
    room = x.new_zeros(*x.shape[:dim], longest, *x.shape[dim + 1 :])
    room.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = Gathering(room, group, dim).wait().split(longest, dim)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


# ---- with their opposites ------------------------------------------------------------------------------------------


class _CopyToRanks(torch.autograd.Function):
    """Forward: as it is. Backward: the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class _ReduceFromRanks(torch.autograd.Function):
    """Forward: the sum over the ranks. Backward: as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SplitToRanks(torch.autograd.Function):
    """Forward: this rank's part. Backward: all ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: list[int] | None) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        part = local_part(x, group, dim) if sizes is None else x.split(sizes, dim)[group.rank]
        return part.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gathered(gradient, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _GatherFromRanks(torch.autograd.Function):
    """Forward: all ranks' parts. Backward: this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: list[int] | None) -> Tensor:
        ctx.dim = dim
        ctx.sizes = sizes or [x.shape[dim]] * group.size
        ctx.rank = group.rank
        return gathered(x, group, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.split(ctx.sizes, ctx.dim)[ctx.rank].contiguous(), None, None, None


class _GatherPositions(torch.autograd.Function):
    """Forward: an all-gather of positions. Backward: a reduce-scatter of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gathered(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Scattering(gradient, ctx.group, ctx.dim).wait(), None, None


class _ScatterSums(torch.autograd.Function):
    """Forward: a reduce-scatter. Backward: an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return Scattering(x, group, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradient, ctx.group, ctx.dim), None, None
