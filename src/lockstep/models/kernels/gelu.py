"""gelu(x + bias), as GPT-2 has it between its two matrix products, as two kernels for a GPU.

The array is the largest of a block (tokens x 4 d), so what counts is how often it is read and written. A compiler fuses
the elementwise part by itself, but then reads x and the incoming gradient once more to add up the bias's gradient. Here
one backward pass does both: each program takes some columns and a group of rows, writes their gradient, and adds up its
columns on the way; the groups' sums are added in the end.

    gelu(z) = z s,  s = sigmoid(2 a (z + 0.044715 z^3)),  a = sqrt(2 / pi) = 0.79788456
    gelu'(z) = s (1 + z (1 - s) 2 a (1 + 3 * 0.044715 z^2))
"""

import torch
import triton  # type: ignore[import-not-found]  # there is none where there is no GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor
from torch.library import triton_op, wrap_triton

FORWARD = (4, 512, 4)
BACKWARD = (16, 128, 4)
"""Rows and columns that a program holds at a time, warps."""
GROUPS = 128
"""Into which backward cuts the rows."""


@triton.jit
def _sigmoid_of(z):  # type: ignore[no-untyped-def]
    """The s of gelu(z)."""
    return tl.sigmoid(2 * 0.7978845608028654 * z * (1 + 0.044715 * z * z))


@triton.jit
def _forward(x, bias, y, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < width)
    z = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place, z * _sigmoid_of(z), mask=inside)


@triton.jit
def _backward(x, bias, dy, dx, sums, rows, width, group, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    totals = tl.zeros((ROWS, COLUMNS), tl.float32)  # each thread adds up its own; they are reduced once, in the end
    first = tl.program_id(1) * group
    for start in range(0, group, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < group) & (first + row[:, None] < rows) & (column[None, :] < width)
        place = (first + row)[:, None].to(tl.int64) * width + column[None, :]
        z = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + b
        incoming = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        s = _sigmoid_of(z)
        slope = s * (1 + z * (1 - s) * 2 * 0.7978845608028654 * (1 + 3 * 0.044715 * z * z))
        tl.store(dx + place, incoming * slope, mask=inside)
        totals += incoming * slope
    tl.store(sums + tl.program_id(1) * width + column, tl.sum(totals, 0), mask=column < width)


@triton_op("lockstep::bias_gelu", mutates_args=())
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias) of (..., width); also inside torch.compile."""
    x = x.contiguous()
    y = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    high, wide, warps = FORWARD
    grid = (triton.cdiv(rows, high), triton.cdiv(width, wide))  # of the second a GPU takes 65,535 at most
    wrap_triton(_forward)[grid](x, bias, y, rows, width, high, wide, num_warps=warps)
    return y


@triton_op("lockstep::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the bias."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    high, wide, warps = BACKWARD
    groups = max(1, min(GROUPS, triton.cdiv(rows, high)))
    sums = torch.empty(groups, width, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(width, wide), groups)
    group = triton.cdiv(rows, groups)
    wrap_triton(_backward)[grid](x, bias, dy, dx, sums, rows, width, group, high, wide, num_warps=warps)
    return dx, sums.sum(0).to(bias.dtype)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    dx, dbias = bias_gelu_backward(dy, *ctx.saved_tensors)
    return dx, dbias


bias_gelu.register_autograd(_differentiate, setup_context=_remember)
