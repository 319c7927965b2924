"""Linear layers and embeddings of which each rank has a part (Megatron's tensor parallelism).

A pair of products with something element-wise between them needs one sum, at its end. With W = [W_0 W_1] cut along its
output features and V = [V_0; V_1] along its input features:

    whole x ──┬── x W_0 ── gelu ── · V_0 ──┐
              │                            + ── whole y        column, then row: one all-reduce forward (y) and one
              └── x W_1 ── gelu ── · V_1 ──┘                   backward (x's gradient)

A transformer's block has two such pairs, attention (each rank some heads) and MLP: 4 all-reduces per block and step.
With sequence parallelism x and y are cut along their positions: an all-gather stands where x comes in, a
reduce-scatter where y goes out, and what lies between two pairs (norm, dropout, residual) is not computed n times.

What hides behind what. Backward of a column-parallel layer has two products, of which only one gives the gradient that
must be summed: that comes first, and travels while the other is computed. With sequence parallelism forward goes in two
halves of the batch where there is a second stream to travel on: one half is sent while the other is multiplied.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.comm.collectives import Pending, all_reduce_async
from lockstep.layout.group import Group, GroupLike, group_of
from lockstep.layout.region import Region, held_as
from lockstep.models.lora import LoRALinear
from lockstep.parallel.cuts import Cut, even_cut, fused_cut
from lockstep.parallel.exchange import (
    PURPOSE,
    Gathering,
    Scattering,
    copy_to_ranks,
    gather_from_ranks,
    gather_positions,
    reduce_from_ranks,
    scatter_sums,
    summed,
)

SEQUENCE = -2
"""The dimension of positions: (batch, positions, features)."""
Tied = dict[Tensor, nn.Parameter]
"""What a parameter was cut to, so that tied ones stay tied."""


class ColumnParallelLinear(nn.Module):
    """y = x W' + b, of which this rank computes its part of the output features.

    A fused layer (`parts`: several outputs in one product, as q, k and v) has its part of each.
    """

    def __init__(
        self,
        linear: nn.Linear,
        process_group: GroupLike = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        cut: Cut | None = None,
        tied: Tied | None = None,
    ) -> None:
        """`cut`: which output features; by default equal parts of each of the layer's `parts`."""
        super().__init__()
        self.group, self.gather_output, self.sequence_parallel = group_of(process_group, "tp"), gather_output, False
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.cut = cut or fused_cut(linear, self.group)
        self.parts = self.cut.widths
        """Output features of this rank, of each part."""
        self.leads_to_row = not gather_output
        """Until then tensors are cut."""
        self.sequence_parallel = sequence_parallel and self.group.size > 1
        tied = {} if tied is None else tied
        self.weight = self._rows(linear.weight, tied)
        self.bias = self._rows(linear.bias, tied) if linear.bias is not None else None
        self.scale: float | None = linear.scale if isinstance(linear, LoRALinear) else None
        """Of a LoRA adapter, the two small matrices beside the layer's own; None: it has none."""
        if isinstance(linear, LoRALinear):
            self.lora_a, self.lora_b = linear.lora_a, self._rows(linear.lora_b, tied)

    def _rows(self, parameter: Tensor, tied: Tied) -> nn.Parameter:
        if parameter not in tied:
            tied[parameter] = held_as(parameter, Region.slice(parameter.shape, 0, *self.cut.ranges))
        return tied[parameter]

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._shared(self.weight), None if self.bias is None else self._shared(self.bias)
        y = column_linear(x, weight, bias, self.group, self.sequence_parallel)
        if self.scale is not None:
            y = y + self.scale * self._adapted(x)
        return gather_from_ranks(y, self.group, -1, self.cut.sizes) if self.gather_output else y

    def _adapted(self, x: Tensor) -> Tensor:
        """A is whole, and its small output is what all ranks' parts of B use."""
        if self.sequence_parallel:  # A sees this rank's positions only
            small = gather_positions(F.linear(x, copy_to_ranks(self.lora_a, self.group)), self.group, SEQUENCE)
        else:
            small = copy_to_ranks(F.linear(x, self.lora_a), self.group)
        return F.linear(small, self._shared(self.lora_b))

    def _shared(self, parameter: nn.Parameter) -> Tensor:
        """Rows that several ranks have (a key head of fewer than there are ranks) have gradients on each: they add."""
        return _SumOfSharedRows.apply(parameter, self.cut, self.group) if self.cut.shared else parameter

    def extra_repr(self) -> str:
        whole = f"{self.in_features} -> {self.out_features}"
        return f"{whole}, {sum(self.parts)} outputs on rank {self.group.rank} of {self.group.size}"


class RowParallelLinear(nn.Module):
    """y = x W' + b, where this rank has its part of the input features; the ranks' outputs are summed."""

    def __init__(
        self,
        linear: nn.Linear,
        process_group: GroupLike = None,
        sequence_parallel: bool = False,
        tied: Tied | None = None,
    ) -> None:
        super().__init__()
        self.group = group_of(process_group, "tp")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.sequence_parallel = sequence_parallel and self.group.size > 1
        self.cut = even_cut(linear.in_features, self.group)
        tied = {} if tied is None else tied
        self.weight = self._columns(linear.weight, tied)
        self.bias = linear.bias
        self.scale: float | None = linear.scale if isinstance(linear, LoRALinear) else None
        if isinstance(linear, LoRALinear):
            self.lora_a, self.lora_b = self._columns(linear.lora_a, tied), linear.lora_b

    def _columns(self, parameter: Tensor, tied: Tied) -> nn.Parameter:
        if parameter not in tied:
            tied[parameter] = held_as(parameter, Region.slice(parameter.shape, 1, *self.cut.ranges))
        return tied[parameter]

    def forward(self, x: Tensor) -> Tensor:
        y = row_linear(x, self.weight, self.bias, self.group, self.sequence_parallel)
        return y if self.scale is None else y + self.scale * self._adapted(x)

    def _adapted(self, x: Tensor) -> Tensor:
        """A's small output is summed; B is whole."""
        small = F.linear(x, self.lora_a)
        if self.sequence_parallel:  # B sees this rank's positions only
            return F.linear(scatter_sums(small, self.group, SEQUENCE), copy_to_ranks(self.lora_b, self.group))
        return F.linear(reduce_from_ranks(small, self.group), self.lora_b)

    def extra_repr(self) -> str:
        whole = f"{self.in_features} -> {self.out_features}"
        return f"{whole}, {self.weight.shape[1]} inputs on rank {self.group.rank} of {self.group.size}"


class VocabParallelEmbedding(nn.Module):
    """An embedding of which this rank has some rows. Tokens of other ranks' rows give zeros; the sum is the lookup."""

    def __init__(
        self,
        embedding: nn.Embedding,
        process_group: GroupLike = None,
        sequence_parallel: bool = False,
        tied: Tied | None = None,
    ) -> None:
        super().__init__()
        self.group = group_of(process_group, "tp")
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.sequence_parallel = sequence_parallel and self.group.size > 1
        self.cut = even_cut(embedding.num_embeddings, self.group, uneven=True)
        tied = {} if tied is None else tied
        if embedding.weight not in tied:
            rows = Region.slice(embedding.weight.shape, 0, *self.cut.ranges)
            tied[embedding.weight] = held_as(embedding.weight, rows)
        self.weight = tied[embedding.weight]

    def forward(self, tokens: Tensor) -> Tensor:
        ((start, stop),) = self.cut.ranges
        if not tokens.is_cuda and tokens.numel() and not 0 <= tokens.min() <= tokens.max() < self.num_embeddings:
            raise IndexError(f"a token is not in the vocabulary of {self.num_embeddings}")
        elsewhere = (tokens < start) | (tokens >= stop)
        if stop > start:
            x = F.embedding((tokens - start).masked_fill(elsewhere, 0), self.weight)
            x = x.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        else:  # more ranks than rows
            x = self.weight.new_zeros(*tokens.shape, self.embedding_dim) + self.weight.sum()
        if self.sequence_parallel:
            return scatter_sums(x, self.group, SEQUENCE)
        return reduce_from_ranks(x, self.group)

    def extra_repr(self) -> str:
        ((start, stop),) = self.cut.ranges
        return f"{self.num_embeddings} x {self.embedding_dim}, rows {start} to {stop} on rank {self.group.rank}"


# ---- products that overlap with what they send -----------------------------------------------------------------------


def in_compute_dtype(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """As autocast does for a linear layer, which looks at torch's own functions only."""
    device = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(device):
        return function(*tensors)
    dtype = torch.get_autocast_dtype(device)
    cast = [None if t is None else t.to(dtype) for t in tensors]
    with torch.autocast(device, enabled=False):
        return function(*cast)


@torch.compiler.disable
def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = False) -> Tensor:
    """x is whole, or cut along its positions; the output is cut along its features."""
    if group.size == 1:
        return F.linear(x, weight, bias)
    if weight.dtype != x.dtype and not weight.requires_grad:  # frozen in a smaller dtype
        x, back = x.to(weight.dtype), x.dtype
        return column_linear(x, weight, bias, group, sequence).to(back)
    return in_compute_dtype(lambda x, w, b: _Column.apply(x, w, b, group, sequence), x, weight, bias)


@torch.compiler.disable
def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool = False) -> Tensor:
    """x is cut along its features; the output is whole, or cut along its positions."""
    if group.size == 1:
        return F.linear(x, weight, bias)
    if weight.dtype != x.dtype and not weight.requires_grad:
        x, back = x.to(weight.dtype), x.dtype
        return row_linear(x, weight, bias, group, sequence).to(back)
    # The sum has n of them. Each rank's gradient of it is whole all the same, as that of y is.
    share = None if bias is None else _Share.apply(bias, group.size)
    if sequence:
        return in_compute_dtype(lambda x, w, b: _SequenceRow.apply(x, w, b, group), x, weight, share)
    return reduce_from_ranks(F.linear(x, weight, share), group)


def halves(x: Tensor) -> tuple[Tensor, ...]:
    """Of the batch, where one can travel while the other is computed with: not on CPUs, whose cores do both."""
    return tuple(x.chunk(2)) if x.is_cuda and x.dim() > 2 and x.shape[0] > 1 else (x,)


class _Column(torch.autograd.Function):
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


class _SumOfSharedRows(torch.autograd.Function):
    """As it is; backward sums the gradient of those rows that other ranks have too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cut: Cut, group: Group) -> Tensor:
        ctx.cut, ctx.group = cut, group
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone()
        parts = zip(gradient.split(ctx.cut.widths), ctx.cut.shared, strict=True)
        shared = [(rows, unit) for rows, unit in parts if unit is not None]
        # A slot for every head that there is: each rank writes into its own, and those of ranks with the same one add.
        slots = [rows.new_zeros(unit.count, *rows.shape) for rows, unit in shared]
        for slot, (rows, unit) in zip(slots, shared, strict=True):
            slot[unit.index] = rows
        total = summed(torch.cat([slot.flatten() for slot in slots]), ctx.group)
        for found, slot, (rows, unit) in zip(total.split([s.numel() for s in slots]), slots, shared, strict=True):
            rows.copy_(found.view_as(slot)[unit.index])
        return gradient, None, None
