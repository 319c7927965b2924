"""The products of layers that are cut over the ranks, with what they send hidden behind them.

Backward of a column-parallel layer has two products, of which only one gives the gradient that must be summed: that
comes first, and travels while the other is computed. With sequence parallelism forward goes in two halves of the batch
where there is a second stream to travel on: one half is sent while the other is multiplied.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.comm.collectives import Pending, all_reduce_async
from lockstep.layout.group import Group
from lockstep.parallel.autocast import as_autocast, no_autocast
from lockstep.parallel.exchange import PURPOSE, Gathering, Scattering, reduce_from_ranks
from lockstep.uncompiled import uncompiled

SEQUENCE = -2
"""The dimension of positions: (batch, positions, features)."""


@uncompiled
def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = False) -> Tensor:
    """x is whole, or cut along its positions; the output is cut along its features."""
    if group.size == 1:
        return F.linear(x, weight, bias)
    if weight.dtype != x.dtype and not weight.requires_grad:  # frozen in a smaller dtype
        x, back = x.to(weight.dtype), x.dtype
        return column_linear(x, weight, bias, group, sequence).to(back)
    with_dtype = as_autocast(x, weight, bias)
    with no_autocast(x.device):
        y: Tensor = _Column.apply(*with_dtype, group, sequence)
    return y


@uncompiled
def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = False) -> Tensor:
    """x is cut along its features; the output is whole, or cut along its positions."""
    if group.size == 1:
        return F.linear(x, weight, bias)
    if weight.dtype != x.dtype and not weight.requires_grad:
        x, back = x.to(weight.dtype), x.dtype
        return row_linear(x, weight, bias, group, sequence).to(back)
    # The sum has n of them. Each rank's gradient of it is whole all the same, as that of y is.
    share = None if bias is None else _Share.apply(bias, group.size)
    if not sequence:
        return reduce_from_ranks(F.linear(x, weight, share), group)
    with_dtype = as_autocast(x, weight, share)
    with no_autocast(x.device):
        y: Tensor = _SequenceRow.apply(*with_dtype, group)
    return y


def halves(x: Tensor) -> tuple[Tensor, ...]:
    """Of the batch, where one can travel while the other is computed with: not on CPUs, whose cores do both."""
    return tuple(x.chunk(2)) if x.is_cuda and x.dim() > 2 and x.shape[0] > 1 else (x,)


class _Column(torch.autograd.Function):
    """A column-parallel product: its input's gradient is all-reduced beside the product for the weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool) -> Tensor:
        ctx.group, ctx.sequence = group, sequence
        parts, outputs = [], []
        for flight in [Gathering(part, group, SEQUENCE) for part in halves(x)] if sequence else [None]:
            parts.append(x if flight is None else flight.wait())
            outputs.append(F.linear(parts[-1], weight, bias))
        # Gathered inputs are kept: to gather them anew for the weight's gradient would send a quarter more.
        ctx.save_for_backward(weight, *parts)
        return joined(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, *parts = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        for_x = for_weight = for_bias = None
        flight: Pending | Scattering | None = None
        if wants_x:
            for_x = gradient @ weight
            if ctx.sequence:
                flight = Scattering(for_x, ctx.group, SEQUENCE)
            else:
                flight = all_reduce_async(for_x, group=ctx.group, purpose=PURPOSE)
        if wants_weight:
            slices = gradient.split([len(part) for part in parts]) if len(parts) > 1 else [gradient]
            products = [rows(g).t() @ rows(x) for g, x in zip(slices, parts, strict=True)]
            for_weight = products[0] if len(products) == 1 else products[0].add_(products[1])
        if wants_bias:
            for_bias = rows(gradient).sum(0)
        if isinstance(flight, Scattering):
            for_x = flight.wait()
        elif flight is not None:
            flight.wait()
        return for_x, for_weight, for_bias, None, None


def rows(x: Tensor) -> Tensor:
    """(..., features) -> (rows, features); also of a single row."""
    return x.reshape(-1, x.shape[-1])


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _SequenceRow(torch.autograd.Function):
    """A row-parallel product whose outputs are reduce-scattered along positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        flights = [Scattering(F.linear(part, weight, bias), group, SEQUENCE) for part in halves(x)]
        return joined([flight.wait() for flight in flights])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        flights = [Gathering(part, ctx.group, SEQUENCE) for part in halves(gradient)]
        for_x: list[Tensor] = []
        for_weight = torch.zeros_like(weight) if wants_weight else None
        for_bias = torch.zeros_like(weight[:, 0]) if wants_bias else None
        for flight, part in zip(flights, halves(x), strict=True):
            whole = flight.wait()
            if wants_x:
                for_x.append(whole @ weight)
            if for_weight is not None:
                for_weight.addmm_(rows(whole).t(), rows(part))
            if for_bias is not None:
                for_bias += rows(whole).sum(0)
        return joined(for_x) if wants_x else None, for_weight, for_bias, None


class _Share(torch.autograd.Function):
    """A rank's share of something that is added on every rank before a sum."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, ranks: int) -> Tensor:
        return bias / ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
