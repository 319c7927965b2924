"""Tokens sorted by the experts that they take, and back: each expert's rows lie together, in the order of tokens.

    sorted_by_expert   the order of all choices, by one stable sort, and how many are each expert's
    spread             a row for each choice
    combined           each token's results, weighted and summed

On a GPU the host waits for none of it but `within_capacity`, and sums are taken in one order: the same in every run.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.models.kernels import usable_on


@dataclass
class Sorted:
    """The choices of all tokens, token by token, in the order of their experts."""

    order: Tensor
    """Row -> the choice that it is for."""
    places: Tensor
    """Choice -> its row."""
    counts: Tensor
    """(experts): rows of each."""
    kept: Tensor | None = None
    """Choice -> whether it has a row; None: all have."""


def sorted_by_expert(chosen: Tensor, experts: int) -> Sorted:
    keys = chosen.flatten()
    if experts <= 256:  # a sort of one byte is one pass
        keys = keys.to(torch.uint8)
    in_order, order = keys.sort(stable=True)
    return Sorted(order, inverse_of(order), counts_of(in_order, experts))


def counts_of(in_order: Tensor, experts: int) -> Tensor:
    """How often each expert is among sorted ones; on the device, without the host, and without thousands of additions
    to one place.
    """
    numbers = torch.arange(experts, device=in_order.device, dtype=in_order.dtype)
    ends = torch.searchsorted(in_order, numbers, right=True)
    return ends.diff(prepend=ends.new_zeros(1))


def inverse_of(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def within_capacity(choices: Sorted, chosen: Tensor, earlier: Tensor, limit: Tensor) -> Sorted:
    """Only each expert's first rows. `earlier`: how many the ranks before this one have for each expert."""
    expert, counts = chosen.flatten()[choices.order], choices.counts
    begins = counts.cumsum(0) - counts
    number = torch.arange(len(expert), device=expert.device) - begins[expert] + earlier[expert]
    stays = number < limit
    order = choices.order[stays]
    kept = torch.zeros_like(stays).index_fill_(0, order, True)
    return Sorted(order, choices.places, counts_of(expert[stays], len(counts)), kept)


def combined(rows: Tensor, weights: Tensor, choices: Sorted) -> Tensor:
    """Each token's results, weighted and summed: (tokens, d_model)."""
    if usable_on(rows) and choices.kept is None:
        from lockstep.models.kernels import experts as kernels

        return kernels.combined(rows, weights, choices.places)
    results = _Collect.apply(rows, choices).view(*weights.shape, rows.shape[-1])  # (tokens, active, d_model)
    return (results * weights.to(results.dtype)[..., None]).sum(1)


def spread(tokens: Tensor, choices: Sorted, active: int) -> Tensor:
    """A row for each choice, sorted: its token."""
    rows: Tensor = _Spread.apply(tokens, choices, active)
    return rows


class _Spread(torch.autograd.Function):
    """Each choice's row: its token. Backward adds up the gradients of a token's rows, always in the same order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, choices: Sorted, active: int) -> Tensor:
        ctx.choices, ctx.active = choices, active
        return tokens.index_select(0, choices.order // active)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if usable_on(gradient) and ctx.choices.kept is None:
            from lockstep.models.kernels import experts as kernels

            return kernels.gathered_sums(gradient, ctx.choices.places, ctx.active), None, None
        rows = of_choices(gradient, ctx.choices)
        return rows.view(len(rows) // ctx.active, ctx.active, rows.shape[-1]).sum(1), None, None


class _Collect(torch.autograd.Function):
    """Each choice's result, token by token; zeros where it has none."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, choices: Sorted) -> Tensor:
        ctx.choices = choices
        return of_choices(rows, choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.choices.order), None


def of_choices(rows: Tensor, choices: Sorted) -> Tensor:
    if choices.kept is None:
        return rows.index_select(0, choices.places)
    return rows.new_zeros(len(choices.places), rows.shape[-1]).index_copy_(0, choices.order, rows)
