"""Three matrices side by side, and the sum of each column on the way, as one kernel for a GPU.

Attention gives the gradients of q, k and v apart, and the layer that made all three wants them side by side, for its
weight, and their columns' sums, for its bias. A compiler writes the one and reads it again for the other. Here each
program takes some columns of one matrix and a group of rows, copies them, and adds them up in fp32; the groups' sums
are added in the end.
"""

import torch
import triton  # type: ignore[import-not-found]  # there is none where there is no GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor
from torch.library import custom_op

SHAPE = (16, 128, 4)
"""Rows and columns that a program holds at a time, warps."""
GROUPS = 128
"""Into which the rows are cut."""


@triton.jit
def _join(first, second, third, joined, sums, rows, width, group, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    part = tl.program_id(2)
    source = first
    if part == 1:
        source = second
    if part == 2:
        source = third
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = part * width + column
    totals = tl.zeros((ROWS, COLUMNS), tl.float32)  # each thread adds up its own; they meet once, in the end
    begin = tl.program_id(1) * group
    for start in range(0, group, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < group) & (begin + row[:, None] < rows) & (column[None, :] < width)
        place = (begin + row)[:, None].to(tl.int64)
        x = tl.load(source + place * width + column[None, :], mask=inside, other=0.0)
        tl.store(joined + place * (3 * width) + there[None, :], x, mask=inside)
        totals += x.to(tl.float32)
    tl.store(sums + tl.program_id(1) * (3 * width) + there, tl.sum(totals, 0), mask=column < width)


@custom_op("lockstep::join_columns", mutates_args=())
def join_columns(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
    """Of three (..., width): (rows, 3 width), and (1, 3 width) with the columns' sums."""
    parts = [part.contiguous() for part in (first, second, third)]
    width = first.shape[-1]
    rows = first.numel() // width
    joined = first.new_empty(rows, 3 * width)
    high, wide, warps = SHAPE
    groups = max(1, min(GROUPS, triton.cdiv(rows, high)))
    sums = torch.empty(groups, 3 * width, dtype=torch.float32, device=first.device)
    grid = (triton.cdiv(width, wide), groups, 3)
    _join[grid](*parts, joined, sums, rows, width, triton.cdiv(rows, groups), high, wide, num_warps=warps)
    return joined, sums.sum(0, keepdim=True).to(first.dtype)


@join_columns.register_fake
def _shapes(first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
    width = first.shape[-1]
    return first.new_empty(first.numel() // width, 3 * width), first.new_empty(1, 3 * width)
