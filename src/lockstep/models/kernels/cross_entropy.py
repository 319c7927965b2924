"""Cross entropy over a large vocabulary, as two kernels for a GPU.

A batch of 32 x 1024 tokens has 3.3 GB of logits over GPT-2's vocabulary, so what the loss costs is how often they are
read and written. Here forward reads them once, and backward reads them once and writes their gradient:

    forward     one program per token runs over its row. Each thread takes 8 neighbours at a time, and has a running
                maximum m and a running sum of exp(x - m), rescaled whenever m grows; the threads are reduced in the
                end. That gives log sum exp(x). Where the target is the maximum, one more look at what stands before it:
                of equal logits, the row names the first. (In fp32, neighbours in the last bit may count as equal.)
    backward    d loss / d x = softmax(x) - [x is the target's] = exp(x - log sum exp) - [...]
                A z-loss of weight z, which adds z (log sum exp)^2, multiplies softmax by 1 + 2 z log sum exp.

All arithmetic is in fp32, whatever the logits are kept in.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found]  # there is none where there is no GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FORWARD = (128, 4)
"""Threads of a program, each with 8 elements of a row at a time; warps that these make."""
BACKWARD = (2048, 8)
"""Elements of a row that a program holds, and warps that share them."""


@triton.jit
def _fold(x, largest, totals):  # type: ignore[no-untyped-def]
    """Some more logits for each thread, in units of log 2: into its maximum, and into its sum relative to that."""
    before, largest = largest, tl.maximum(largest, tl.max(x, 1))
    at = tl.where(largest == -float("inf"), 0.0, largest)  # -inf - -inf is no number
    return largest, totals * tl.exp2(before - at) + tl.sum(tl.exp2(x - at[:, None]), 1)


@triton.jit
def _forward(logits, targets, losses, log_sums, correct, width, ignored, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    counts = target != ignored
    chosen = tl.load(logits + tl.where(counts, target, 0)).to(tl.float32)
    column = 8 * tl.arange(0, THREADS)[:, None] + tl.arange(0, 8)[None, :]
    largest = tl.full((THREADS,), -float("inf"), tl.float32)
    totals = tl.zeros((THREADS,), tl.float32)
    piece = 8 * THREADS
    whole = width // piece * piece
    for start in tl.range(0, whole, piece, loop_unroll_factor=2):  # two loads in flight
        x = tl.load(logits + start + column).to(tl.float32)
        largest, totals = _fold(x * LOG2_E, largest, totals)
    if whole < width:
        x = tl.load(logits + whole + column, mask=whole + column < width, other=-float("inf")).to(tl.float32)
        largest, totals = _fold(x * LOG2_E, largest, totals)
    highest = tl.max(largest, 0)
    at = tl.where(highest == -float("inf"), 0.0, highest)
    log_sum = (highest + tl.log2(tl.sum(totals * tl.exp2(largest - at), 0))) * LN_2
    tl.store(log_sums + row, log_sum)
    tl.store(losses + row, tl.where(counts, log_sum - chosen, 0.0))
    is_named = counts & (chosen * LOG2_E == highest)
    if is_named:
        before_it = tl.zeros((THREADS, 8), tl.int32)
        for first in range(0, target, piece):
            x = tl.load(logits + first + column, mask=first + column < width, other=0.0).to(tl.float32)
            before_it |= ((x == chosen) & (first + column < target)).to(tl.int32)
        is_named = tl.max(tl.max(before_it, 1), 0) == 0
    tl.store(correct + row, is_named.to(tl.int32))


@triton.jit
def _backward(logits, targets, log_sums, slope, gradient, width, ignored, z_loss, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = column < width
    target = tl.load(targets + row)
    x = tl.load(logits + row * width + column, mask=inside, other=0.0).to(tl.float32)
    log_sum = tl.load(log_sums + row)
    softmax = tl.exp(x - log_sum) * (1.0 + 2.0 * z_loss * log_sum)
    scale = tl.where(target != ignored, tl.load(slope).to(tl.float32), 0.0)
    tl.store(gradient + row * width + column, scale * (softmax - (column == target).to(tl.float32)), mask=inside)


class _CrossEntropy(torch.autograd.Function):
    """Loss and gradient of the logits in one pass each, by kernels of our own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int, z_loss: float) -> tuple[Tensor, Tensor]:
        logits, targets = logits.contiguous(), targets.contiguous()
        rows, width = logits.shape
        losses, log_sums = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
        correct = torch.empty(rows, dtype=torch.int32, device=logits.device)
        threads, warps = FORWARD
        _forward[(rows,)](logits, targets, losses, log_sums, correct, width, ignored, threads, num_warps=warps)
        ctx.save_for_backward(logits, targets, log_sums)
        ctx.ignored, ctx.z_loss = ignored, z_loss
        right = correct.sum()
        ctx.mark_non_differentiable(right)
        return losses.sum(), right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        logits, targets, log_sums = ctx.saved_tensors
        rows, width = logits.shape
        gradient = torch.empty_like(logits)
        piece, warps = BACKWARD
        grid = (rows, triton.cdiv(width, piece))
        given = slope, gradient, width, ctx.ignored, ctx.z_loss
        _backward[grid](logits, targets, log_sums, *given, piece, num_warps=warps)
        return gradient, None, None, None


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """(sum of losses, correct predictions) of logits (tokens, vocabulary); targets that are `ignored` count nowhere.
    `z_loss` is in the gradients only.
    """
    found: tuple[Tensor, Tensor] = _CrossEntropy.apply(logits, targets, ignored, z_loss)
    return found
