"""The matrix products of tensor-parallel layers, overlapped with their communication.

Backward of a column-parallel layer has two products, and only the gradient of the inputs must be all-reduced: that
comes first, and is in flight while the other is computed. With sequence parallelism forward runs in two halves of the
batch where there is a second stream: one half is communicated while the other is multiplied. The gathered inputs are
not kept for backward: they are gathered again, during the product of the inputs' gradient.

In a zero-bubble schedule the products for the weights' gradients are deferred to the weight pass (`weight_pass.py`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.comm.collectives import all_reduce_async
from lockstep.comm.pending import Pending
from lockstep.layout.group import Group
from lockstep.models.autocast import no_autocast
from lockstep.parallel.pipeline.weight_pass import Defer, deferring, is_recomputed
from lockstep.parallel.tensor.exchange import PURPOSE, Gathering, Scattering, reduce_from_ranks
from lockstep.uncompiled import uncompiled

SEQUENCE = -2
"""The dimension of positions: (batch, positions, features)."""


@uncompiled
def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    sequence: bool = False,
    keep_gathered: bool = False,
) -> Tensor:
    """x is whole, or cut along its positions; the output is cut along its features.

    `keep_gathered`: with `sequence`, the gathered x is kept for backward, which else gathers it again.
    """
    if group.size == 1:
        return F.linear(x, weight, bias)
    if weight.dtype != x.dtype and not weight.requires_grad:  # frozen in a smaller dtype
        x, back = x.to(weight.dtype), x.dtype
        return column_linear(x, weight, bias, group, sequence, keep_gathered).to(back)
    # What is recomputed in backward keeps nothing from forward: gathering it a third time would save no memory.
    keep_gathered = keep_gathered or is_recomputed()
    given, cast, added, defer = deferring(x, weight, bias)
    with no_autocast(x.device):
        y: Tensor = _Column.apply(given, cast, added, group, sequence, keep_gathered, defer)
    return y


@uncompiled
def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = False) -> Tensor:
    """x is cut along its features; the output is whole, or cut along its positions."""
    if group.size == 1:
        return F.linear(x, weight, bias)
    if weight.dtype != x.dtype and not weight.requires_grad:
        x, back = x.to(weight.dtype), x.dtype
        return row_linear(x, weight, bias, group, sequence).to(back)
    # The sum would add the bias n times, so each adds 1/n. Its gradient is not divided: each rank has that of y whole.
    share = None if bias is None else _Share.apply(bias, group.size)
    if not sequence:
        return reduce_from_ranks(F.linear(x, weight, share), group)
    given, cast, added, defer = deferring(x, weight, share)
    with no_autocast(x.device):
        y: Tensor = _SequenceRow.apply(given, cast, added, group, defer)
    return y


def halves(x: Tensor) -> tuple[Tensor, ...]:
    """Halves of the batch, where one can be sent while the other is computed: not on CPUs, whose cores do both."""
    return tuple(x.chunk(2)) if x.is_cuda and x.dim() > 2 and x.shape[0] > 1 else (x,)


class _Column(torch.autograd.Function):
    """A column-parallel product: its input's gradient is all-reduced during the product for the weight's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        sequence: bool,
        keep_gathered: bool,
        defer: Defer | None,
    ) -> Tensor:
        ctx.group, ctx.sequence, ctx.defer = group, sequence, defer
        ctx.gathers_again = sequence and not keep_gathered
        parts, outputs = [], []
        for flight in [Gathering(part, group, SEQUENCE) for part in halves(x)] if sequence else [None]:
            parts.append(x if flight is None else flight.wait())
            outputs.append(F.linear(parts[-1], weight, bias))
        ctx.save_for_backward(weight, *([x] if ctx.gathers_again else parts))
        return joined(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, *parts = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        for_x = for_weight = for_bias = None
        for_input: Pending | Scattering | None = None
        whole = Inputs(parts, ctx.group if ctx.gathers_again else None)
        if wants_weight:
            whole.prepare()  # in flight beside the product of the inputs' gradient
        if wants_x:
            for_x = gradient @ weight
            if ctx.sequence:
                for_input = Scattering(for_x, ctx.group, SEQUENCE)
            else:
                for_input = all_reduce_async(for_x, group=ctx.group, purpose=PURPOSE)
        if ctx.defer is not None:
            ctx.defer(lambda: weight_gradient(gradient, whole.take()), whole.prepare)
        elif wants_weight:
            for_weight = weight_gradient(gradient, whole.take())
        if wants_bias:
            for_bias = rows(gradient).sum(0)
        if isinstance(for_input, Scattering):
            for_x = for_input.wait()
        elif for_input is not None:
            for_input.wait()
        return for_x, for_weight, for_bias, None, None, None, None


class Inputs:
    """The inputs of a column-parallel layer, for its weight's gradient: kept from forward, or gathered once more."""

    def __init__(self, parts: list[Tensor], gather_over: Group | None) -> None:
        self._parts, self._group = parts, gather_over
        self._flights: list[Gathering] = []

    def prepare(self) -> None:
        """Issue the all-gathers, unless they have been issued."""
        if self._group is not None and not self._flights:
            self._flights = [Gathering(half, self._group, SEQUENCE) for part in self._parts for half in halves(part)]

    def take(self) -> list[Tensor]:
        """The whole inputs, in one or two parts of the batch."""
        self.prepare()
        return [flight.wait() for flight in self._flights] if self._group is not None else self._parts


def weight_gradient(gradient: Tensor, parts: list[Tensor]) -> Tensor:
    """From the outputs' gradient, and the inputs in parts of the batch."""
    slices = gradient.split([len(part) for part in parts]) if len(parts) > 1 else [gradient]
    products = [rows(g).t() @ rows(x) for g, x in zip(slices, parts, strict=True)]
    return products[0] if len(products) == 1 else products[0].add_(products[1])


def rows(x: Tensor) -> Tensor:
    """(..., features) -> (rows, features); also of a single row."""
    return x.reshape(-1, x.shape[-1])


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _SequenceRow(torch.autograd.Function):
    """A row-parallel product whose outputs are reduce-scattered along positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, defer: Defer | None) -> Tensor:
        ctx.group, ctx.defer = group, defer
        ctx.save_for_backward(x, weight)
        flights = [Scattering(F.linear(part, weight, bias), group, SEQUENCE) for part in halves(x)]
        return joined([flight.wait() for flight in flights])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        parts = halves(x)
        flights = [Gathering(part, ctx.group, SEQUENCE) for part in halves(gradient)]
        for_x: list[Tensor] = []
        for_weight = torch.zeros_like(weight) if wants_weight else None
        for_bias = torch.zeros_like(weight[:, 0]) if wants_bias else None
        gathered: list[Tensor] = []
        for flight, part in zip(flights, parts, strict=True):
            gathered.append(flight.wait())
            if wants_x:
                for_x.append(gathered[-1] @ weight)
            if for_weight is not None:
                for_weight.addmm_(rows(gathered[-1]).t(), rows(part))
            if for_bias is not None:
                for_bias += rows(gathered[-1]).sum(0)
        if ctx.defer is not None:
            ctx.defer(lambda: weight_gradient(joined(gathered), list(parts)))
        return joined(for_x) if wants_x else None, for_weight, for_bias, None, None


class _Share(torch.autograd.Function):
    """A rank's share of something that is added on every rank before a sum."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, ranks: int) -> Tensor:
        return bias / ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
