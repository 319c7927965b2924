"""A linear layer of rows in bf16 and a weight in fp32, on the matrix units of a GPU: scores and the weight's gradient
as exact as in fp32.

A number in fp32 is the sum of three in bf16: 8 + 8 + 8 bits. So the weight becomes three weights, and one product in
bf16, which adds up in fp32, gives all three results. In fp32 itself a GPU takes its slow units, and a copy of the rows.

    forward    y = x w1 + x w2 + x w3
    backward   of the weight: the gradient in three parts as well, times x. Of x, which has 8 bits: with w1 alone
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found]  # there is none where there is no GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor
from torch.autograd.function import once_differentiable

PARTS = 3
ELEMENTS = 2048
"""Of a program."""


@triton.jit
def _split(x, parts, count, width, PARTS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    into = parts + place // width * PARTS * width + place % width
    rest = tl.load(x + place, mask=inside, other=0.0)
    for part in tl.static_range(PARTS):
        narrow = rest.to(tl.bfloat16)
        tl.store(into + part * width, narrow, mask=inside)
        rest -= narrow.to(tl.float32)


def split(x: Tensor) -> Tensor:
    """(rows, width) in fp32 -> (rows, 3, width) in bf16, which add up to it."""
    x = x.contiguous()
    parts = x.new_empty(len(x), PARTS, x.shape[1], dtype=torch.bfloat16)
    if count := x.numel():
        _split[(triton.cdiv(count, ELEMENTS),)](x, parts, count, x.shape[1], PARTS, ELEMENTS)
    return parts


class _ExactLinear(torch.autograd.Function):
    """As `exact_linear`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        parts = split(weight)
        ctx.save_for_backward(rows, parts)
        every = torch.mm(rows, parts.flatten(0, 1).t(), out_dtype=torch.float32)  # (rows, out * 3)
        return every.view(len(rows), len(weight), PARTS).sum(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        wants_rows, wants_weight = ctx.needs_input_grad
        parts = split(gradient).flatten(1)  # (rows, 3 * out)
        for_rows = parts @ weight[:, 0].repeat(PARTS, 1) if wants_rows else None
        if not wants_weight:
            return for_rows, None
        every = torch.mm(parts.t(), rows, out_dtype=torch.float32)
        return for_rows, every.view(PARTS, -1, rows.shape[1]).sum(0)


def exact_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """rows (n, in) in bf16, weight (out, in) in fp32 -> (n, out) in fp32."""
    y: Tensor = _ExactLinear.apply(rows, weight)
    return y
