"""Cross entropy over a large vocabulary, as two kernels for a GPU.

A batch of 32 x 1024 tokens has 3.3 GB of logits over GPT-2's vocabulary, so what the loss costs is how often they are
read and written. Here forward reads them once, and backward reads them once and writes their gradient:

    forward     one program per token runs over its row. Each lane has a running maximum m of its own and a running sum
                of exp(x - m), rescaled whenever m grows; only in the end do the lanes meet. That gives log sum exp(x),
                and on the way it is found out whether the target is what the row names
    backward    d loss / d x = softmax(x) - [x is the target's] = exp(x - log sum exp) - [...]

All arithmetic is in fp32, whatever the logits are kept in.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found]  # there is none where there is no GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor
from torch.autograd.function import once_differentiable

FORWARD = (4, 512, 2)
"""Columns that a lane takes at a time, lanes, warps."""
BACKWARD = (2048, 8)
"""Columns of a program, warps."""


@triton.jit
def _forward(logits, targets, losses, log_sums, correct, width, ignored, DEEP: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    counts = target != ignored
    chosen = tl.load(logits + tl.where(counts, target, 0)).to(tl.float32)
    column = tl.arange(0, DEEP)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest = tl.full((LANES,), -float("inf"), tl.float32)
    totals = tl.zeros((LANES,), tl.float32)
    before_it = tl.zeros((DEEP, LANES), tl.int1)
    for _ in range(0, width, DEEP * LANES):
        x = tl.load(logits + column, mask=column < width, other=-float("inf")).to(tl.float32)
        before, largest = largest, tl.maximum(largest, tl.max(x, 0))
        at = tl.where(largest == -float("inf"), 0.0, largest)  # -inf - -inf is no number
        totals = totals * tl.exp(before - at) + tl.sum(tl.exp(x - at[None, :]), 0)
        before_it |= (x == chosen) & (column < target)  # of equal logits, the first is named
        column += DEEP * LANES
    highest = tl.max(largest, 0)
    at = tl.where(highest == -float("inf"), 0.0, highest)
    log_sum = highest + tl.log(tl.sum(totals * tl.exp(largest - at), 0))
    tl.store(log_sums + row, log_sum)
    tl.store(losses + row, tl.where(counts, log_sum - chosen, 0.0))
    is_first = tl.max(tl.max(before_it.to(tl.int32), 0), 0) == 0
    tl.store(correct + row, (counts & (chosen == highest) & is_first).to(tl.int32))


@triton.jit
def _backward(logits, targets, log_sums, slope, gradient, width, ignored, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = column < width
    target = tl.load(targets + row)
    x = tl.load(logits + row * width + column, mask=inside, other=0.0).to(tl.float32)
    softmax = tl.exp(x - tl.load(log_sums + row))
    scale = tl.where(target != ignored, tl.load(slope).to(tl.float32), 0.0)
    tl.store(gradient + row * width + column, scale * (softmax - (column == target).to(tl.float32)), mask=inside)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
        logits, targets = logits.contiguous(), targets.contiguous()
        rows, width = logits.shape
        losses, log_sums = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
        correct = torch.empty(rows, dtype=torch.int32, device=logits.device)
        deep, lanes, warps = FORWARD
        _forward[(rows,)](logits, targets, losses, log_sums, correct, width, ignored, deep, lanes, num_warps=warps)
        ctx.save_for_backward(logits, targets, log_sums)
        ctx.ignored = ignored
        right = correct.sum()
        ctx.mark_non_differentiable(right)
        return losses.sum(), right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Any) -> tuple[Tensor, None, None]:
        logits, targets, log_sums = ctx.saved_tensors
        rows, width = logits.shape
        gradient = torch.empty_like(logits)
        piece, warps = BACKWARD
        grid = (rows, triton.cdiv(width, piece))
        _backward[grid](logits, targets, log_sums, slope, gradient, width, ctx.ignored, piece, num_warps=warps)
        return gradient, None, None


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """(sum of losses, correct predictions) of logits (tokens, vocabulary); targets that are `ignored` count nowhere."""
    found: tuple[Tensor, Tensor] = _CrossEntropy.apply(logits, targets, ignored)
    return found
