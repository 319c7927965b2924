"""What a mixture of experts does with rows between its matrix products, as kernels for a GPU.

Rows are (tokens x active) of d_model elements each, the largest arrays of the layer, so what counts is how often they
are read and written:

    combine   y[t] = sum_j weights[t, j] rows[places[t, j]]: each row once, where a gathered copy would be multiplied
              and then added up. Backward writes the gradient of each row once, and reads each row once for the weights'
    gather    the same without weights: what backward adds up for a token that has gone to several experts
    swiglu    silu(gate) * up, which one product has given, and both gradients in one pass
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found]  # there is none where there is no GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor
from torch.autograd.function import once_differentiable

COLUMNS = 1024
"""That a program holds at a time, at most."""
ELEMENTS = 4096
"""Of an elementwise program."""


@triton.jit
def _combine(rows, weights, places, y, width, active, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in range(active):
        place = tl.load(places + token * active + j)
        row = tl.load(rows + place * width + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + token * active + j).to(tl.float32)
        total += row
    tl.store(y + token * width + column, total, mask=inside)


@triton.jit
def _combine_backward(rows, weights, places, dy, drows, dweights, width, active, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    token = tl.program_id(0).to(tl.int64)
    for j in range(active):
        place = tl.load(places + token * active + j)
        weight = tl.load(weights + token * active + j).to(tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < width
            incoming = tl.load(dy + token * width + column, mask=inside, other=0.0).to(tl.float32)
            row = tl.load(rows + place * width + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(drows + place * width + column, incoming * weight, mask=inside)
            total += incoming * row
        tl.store(dweights + token * active + j, tl.sum(total, 0))


@triton.jit
def _swiglu(both, y, count, width, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    gate = both + place // width * 2 * width + place % width
    g = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def _swiglu_backward(both, dy, dboth, count, width, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    given = place // width * 2 * width + place % width
    g = tl.load(both + given, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(both + given + width, mask=inside, other=0.0).to(tl.float32)
    incoming = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dboth + given, incoming * u * s * (1 + g * (1 - s)), mask=inside)
    tl.store(dboth + given + width, incoming * g * s, mask=inside)


def columns_of(width: int) -> int:
    found: int = min(COLUMNS, triton.next_power_of_2(width))
    return found


def gathered_sums(rows: Tensor, places: Tensor, active: int, weights: Tensor | None = None) -> Tensor:
    """(tokens, d): for each token the sum of its `active` rows, weighted or not."""
    rows = rows.contiguous()
    tokens, width = len(places) // active, rows.shape[1]
    y = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    columns = columns_of(width)
    if tokens:
        grid = (tokens, triton.cdiv(width, columns))
        given = rows if weights is None else weights.contiguous()  # not read without weights
        _combine[grid](rows, given, places, y, width, active, weights is not None, columns)
    return y


class _Combined(torch.autograd.Function):
    """As `combined`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, places)
        return gathered_sums(rows, places, weights.shape[1], weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights, places = ctx.saved_tensors
        rows, weights, dy = rows.contiguous(), weights.contiguous(), dy.contiguous()
        drows, dweights = torch.empty_like(rows), torch.empty_like(weights)
        width = rows.shape[1]
        if len(dy):
            _combine_backward[(len(dy),)](
                rows, weights, places, dy, drows, dweights, width, weights.shape[1], columns_of(width)
            )
        return drows, dweights, None


def combined(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """rows (tokens * active, d), weights (tokens, active), places (tokens * active) -> (tokens, d)."""
    y: Tensor = _Combined.apply(rows, weights, places)
    return y


class _SwiGLU(torch.autograd.Function):
    """As `swiglu`."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        y = both.new_empty(len(both), both.shape[1] // 2)
        if count := y.numel():
            _swiglu[(triton.cdiv(count, ELEMENTS),)](both, y, count, y.shape[1], ELEMENTS, num_warps=8)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        dy, dboth = dy.contiguous(), torch.empty_like(both)
        if count := dy.numel():
            _swiglu_backward[(triton.cdiv(count, ELEMENTS),)](
                both, dy, dboth, count, dy.shape[1], ELEMENTS, num_warps=8
            )
        return dboth


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) * up, where a row is gate and then up: (rows, 2 width) -> (rows, width)."""
    y: Tensor = _SwiGLU.apply(both)
    return y
