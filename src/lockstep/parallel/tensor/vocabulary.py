"""Cross entropy of logits whose columns are split over the ranks: no rank ever holds a whole row.

    loss = log(sum over all v of exp(logit_v)) - logit_target

Each rank has its part of the sum, and one of them has the target's logit. Three numbers per token are reduced, in two
messages: the largest logit (so that exp does not overflow), then the sum and the target's logit. To gather logits would
send vocabulary / n numbers per token from each rank. Backward sends nothing: softmax minus one at the target, each rank
for its own columns.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.comm.collectives import all_gather_objects, all_reduce
from lockstep.data.batch import IGNORED
from lockstep.layout.group import Group, GroupLike, group_of
from lockstep.parallel.tensor.exchange import PURPOSE

MAX = dist.ReduceOp.MAX


def vocab_parallel_cross_entropy(
    logits_part: Tensor, targets: Tensor, process_group: GroupLike = None, start: int | None = None
) -> Tensor:
    """Loss of each target, 0 where it is IGNORED (-100), in fp32 or better: the shape of `targets`.

        logits_part = torch.randn(8, 6 // world.size, requires_grad=True)  # of a vocabulary of 6
        lockstep.vocab_parallel_cross_entropy(logits_part, targets).mean().backward()

    logits_part: (..., this rank's part of the vocabulary). `start`: its first column; None: the ranks exchange
    their widths, and the parts are consecutive.
    """
    group = group_of(process_group, "tp")
    if start is None:
        widths = all_gather_objects(logits_part.shape[-1], group)
        start = sum(widths[: group.rank])
        outside = (targets != IGNORED) & ((targets < 0) | (targets >= sum(widths)))
        if not targets.is_cuda and outside.any():
            raise IndexError(f"target {int(targets[outside][0])} is not in the vocabulary of {sum(widths)}")
    loss, _ = cross_entropy_of_parts(logits_part, targets, group, start)
    return loss


def cross_entropy_of_parts(
    logits: Tensor, targets: Tensor, group: Group, start: int, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(loss of each target, whether its logit is the largest of all). `z_loss` (`models/loss.py`): in the gradients."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    loss, correct = _CrossEntropy.apply(logits, targets, group, start, z_loss)
    return loss, correct


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of logits whose columns are split over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: Group, start: int, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        lowest = torch.finfo(logits.dtype).min
        largest = logits.amax(-1) if width else torch.full_like(targets, lowest, dtype=logits.dtype)
        if group.size > 1:
            all_reduce(largest, MAX, group, purpose=PURPOSE)
        column = targets - start
        elsewhere = (column < 0) | (column >= width)
        column = column.masked_fill(elsewhere, 0)
        exponentials = (logits - largest.unsqueeze(-1)).exp_()
        both = torch.zeros(2, *targets.shape, dtype=logits.dtype, device=logits.device)
        both[0] = exponentials.sum(-1)
        if width:
            both[1] = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill_(elsewhere, 0.0)
        if group.size > 1:
            all_reduce(both, group=group, purpose=PURPOSE)
        total, target = both
        ignored = targets == IGNORED
        log_sum = total.log() + largest
        loss = (log_sum - target).masked_fill_(ignored, 0.0)
        correct = (target == largest).logical_and_(~ignored)
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, column, elsewhere, ignored, log_sum if z_loss else None)
        ctx.z_loss = z_loss
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        softmax, column, elsewhere, ignored, log_sum = ctx.saved_tensors
        for_logits = softmax.clone()
        if log_sum is not None:
            for_logits.mul_((1 + 2 * ctx.z_loss * log_sum).unsqueeze(-1))
        if for_logits.shape[-1]:
            one = (~elsewhere).to(softmax.dtype).unsqueeze(-1)
            for_logits.scatter_add_(-1, column.unsqueeze(-1), -one)
        for_logits.mul_(gradient.masked_fill(ignored, 0.0).unsqueeze(-1))
        return for_logits, None, None, None, None
