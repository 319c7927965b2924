"""Linear layers and embeddings that are split over the ranks (Megatron's tensor parallelism).

A pair of products with something element-wise between them needs one sum, at its end. With W = [W_0 W_1] cut along its
output features and V = [V_0; V_1] along its input features:

    whole x ──┬── x W_0 ── gelu ── · V_0 ──┐
              │                            + ── whole y        column, then row: one all-reduce forward (y) and one
              └── x W_1 ── gelu ── · V_1 ──┘                   backward (x's gradient)

A transformer's block has two such pairs, attention (each rank some heads) and MLP: 4 all-reduces per block and step.
With sequence parallelism x and y are cut along their positions: x is all-gathered on entry, y is
reduce-scattered on exit, and what lies between two pairs (norm, dropout, residual) is not computed n times.
Backward gathers x once more for the gradient of W, unless `keep_gathered`: two more all-gathers per block and step.

The products and their overlap with communication are in `parallel_products.py`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.layout.group import Group, GroupLike, group_of
from lockstep.layout.region import Region, copied_with_regions, held_as
from lockstep.models.lora import LoRALinear
from lockstep.parallel.tensor.custom_linear import CustomForward
from lockstep.parallel.tensor.cuts import Cut, even_cut, fused_cut
from lockstep.parallel.tensor.exchange import (
    copy_to_ranks,
    gather_from_ranks,
    gather_positions,
    reduce_from_ranks,
    scatter_sums,
    summed,
)
from lockstep.parallel.tensor.parallel_products import SEQUENCE, column_linear, row_linear

Tied = dict[Tensor, nn.Parameter]
"""The cut version of each parameter, so that tied ones stay tied."""


def cut_parameter(parameter: Tensor, dim: int, cut: Cut, tied: Tied | None) -> nn.Parameter:
    """This rank's part of it; the same as before, if it is tied to one that has been cut."""
    tied = {} if tied is None else tied
    if parameter not in tied:
        tied[parameter] = held_as(parameter, Region.slice(parameter.shape, dim, *cut.ranges))
    return tied[parameter]


class CutModule(nn.Module):
    """A layer that is split over the ranks. The parameters of a deep copy keep their regions."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "CutModule":
        return copied_with_regions(self, memo)


class ColumnParallelLinear(CutModule):
    """y = x W' + b, where this rank computes its part of the output features.

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
        keep_gathered: bool = False,
    ) -> None:
        """`cut`: which output features; by default equal parts of each of the layer's `parts`. `keep_gathered`: with
        `sequence_parallel`, gathered inputs are kept for backward; else it gathers them again.
        """
        super().__init__()
        self.custom_forward = CustomForward.of(linear, row=False)
        self.group, self.gather_output = group_of(process_group, "tp"), gather_output
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.cut = cut or fused_cut(linear, self.group)
        self.parts = self.cut.widths
        """Output features of this rank, of each part."""
        self.leads_to_row = not gather_output
        """A row-parallel layer follows, and tensors are cut until then."""
        self.sequence_parallel = sequence_parallel and self.group.size > 1
        self.gathers_again = self.sequence_parallel and not keep_gathered and self.custom_forward is None
        """Backward gathers the inputs again, for the gradient of the weight."""
        self.weight = cut_parameter(linear.weight, 0, self.cut, tied)
        self.bias = cut_parameter(linear.bias, 0, self.cut, tied) if linear.bias is not None else None
        self.scale: float | None = linear.scale if isinstance(linear, LoRALinear) else None
        """The scale of a LoRA adapter, two small matrices beside the weight; None: there is no adapter."""
        if isinstance(linear, LoRALinear):
            self.lora_a, self.lora_b = linear.lora_a, cut_parameter(linear.lora_b, 0, self.cut, tied)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._shared(self.weight), None if self.bias is None else self._shared(self.bias)
        if self.custom_forward is not None:
            sequence = self.sequence_parallel
            whole = gather_positions(x, self.group, SEQUENCE) if sequence else copy_to_ranks(x, self.group)
            y = self.custom_forward(whole, weight, bias)
        else:
            y = column_linear(x, weight, bias, self.group, self.sequence_parallel, not self.gathers_again)
        if self.scale is not None:
            y = y + self.scale * self._adapted(x)
        return gather_from_ranks(y, self.group, -1, self.cut.sizes) if self.gather_output else y

    def _adapted(self, x: Tensor) -> Tensor:
        """Every rank has all of A, and uses its small output for its part of B."""
        if self.sequence_parallel:  # A sees this rank's positions only
            small = gather_positions(F.linear(x, copy_to_ranks(self.lora_a, self.group)), self.group, SEQUENCE)
        else:
            small = copy_to_ranks(F.linear(x, self.lora_a), self.group)
        return F.linear(small, self._shared(self.lora_b))

    def _shared(self, parameter: nn.Parameter) -> Tensor:
        """Rows that several ranks have (key heads, where there are more ranks) get gradients on each: sum them."""
        return _SumOfSharedRows.apply(parameter, self.cut, self.group) if self.cut.shared else parameter

    def extra_repr(self) -> str:
        whole = f"{self.in_features} -> {self.out_features}"
        return f"{whole}, {sum(self.parts)} outputs on rank {self.group.rank} of {self.group.size}"


class RowParallelLinear(CutModule):
    """y = x W' + b, where this rank has its part of the input features; the ranks' outputs are summed."""

    def __init__(
        self,
        linear: nn.Linear,
        process_group: GroupLike = None,
        sequence_parallel: bool = False,
        tied: Tied | None = None,
    ) -> None:
        super().__init__()
        self.custom_forward = CustomForward.of(linear, row=True)
        self.group = group_of(process_group, "tp")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.sequence_parallel = sequence_parallel and self.group.size > 1
        self.cut = even_cut(linear.in_features, self.group)
        self.weight = cut_parameter(linear.weight, 1, self.cut, tied)
        self.bias = linear.bias
        self.scale: float | None = linear.scale if isinstance(linear, LoRALinear) else None
        if isinstance(linear, LoRALinear):
            self.lora_a, self.lora_b = cut_parameter(linear.lora_a, 1, self.cut, tied), linear.lora_b

    def forward(self, x: Tensor) -> Tensor:
        if self.custom_forward is not None:
            once = 1.0 if self.group.rank == 0 else 0.0  # only the first rank adds a bias that is not zero
            y = self.custom_forward(
                x, self.weight, None if self.bias is None else copy_to_ranks(self.bias, self.group) * once
            )
            y = scatter_sums(y, self.group, SEQUENCE) if self.sequence_parallel else reduce_from_ranks(y, self.group)
        else:
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


class VocabParallelEmbedding(CutModule):
    """An embedding whose rows are split over the ranks. Other ranks' tokens give zeros; the sum is the lookup."""

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
        self.weight = cut_parameter(embedding.weight, 0, self.cut, tied)

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


class _SumOfSharedRows(torch.autograd.Function):
    """The identity; backward sums the gradient of those rows that several ranks have."""

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
        # One slot per head: each rank writes into its head's slot, and those of ranks with the same head add up.
        slots = [rows.new_zeros(unit.count, *rows.shape) for rows, unit in shared]
        for slot, (rows, unit) in zip(slots, shared, strict=True):
            slot[unit.index] = rows
        total = summed(torch.cat([slot.flatten() for slot in slots]), ctx.group)
        for found, slot, (rows, unit) in zip(total.split([s.numel() for s in slots]), slots, shared, strict=True):
            rows.copy_(found.view_as(slot)[unit.index])
        return gradient, None, None
