"""10. Less traffic: bf16, top-k with error feedback, PowerSGD, local SGD and DiLoCo."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: solution
PREDICTED_BYTES: float | None = 2 * (3 - 1) / 3 * (100 * 2 + 50 * 2) * 8
#: skeleton
# PREDICTED_BYTES: float | None = None  # PowerSGD of rank 2, a matrix of 100 by 50 float64, 3 ranks
#: end


def reduce_bf16(gradient: Tensor) -> Tensor:
    """The mean over all ranks, sent in bfloat16, returned in the gradient's own dtype."""
    #: solution
    narrow = (gradient / dist.get_world_size()).to(torch.bfloat16)
    dist.all_reduce(narrow)
    return narrow.to(gradient.dtype)
    #: todo half the bytes
    #: wrong still-wide
    # wide = gradient / dist.get_world_size()
    # dist.all_reduce(wide)
    # return wide.to(torch.bfloat16).to(gradient.dtype)
    #: end


class TopK:
    """Of a flat gradient the k largest elements of each rank, with error feedback."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.rest: Tensor | None = None
        """What was not sent yet."""

    def reduce(self, gradient: Tensor) -> Tensor:
        """The mean over all ranks of what each has sent."""
        size = dist.get_world_size()
        full = gradient if self.rest is None else gradient + self.rest
        #: solution
        indices = full.abs().topk(self.k).indices
        values = full[indices]
        self.rest = full.clone()
        self.rest[indices] = 0
        all_indices = [torch.empty_like(indices) for _ in range(size)]
        all_values = [torch.empty_like(values) for _ in range(size)]
        dist.all_gather(all_indices, indices)
        dist.all_gather(all_values, values)
        return torch.zeros_like(gradient).index_add_(0, torch.cat(all_indices), torch.cat(all_values)) / size
        #: todo choose, keep the rest, gather indices and values, add up
        #: wrong no-feedback
        # indices = full.abs().topk(self.k).indices
        # values = full[indices]
        # all_indices = [torch.empty_like(indices) for _ in range(size)]
        # all_values = [torch.empty_like(values) for _ in range(size)]
        # dist.all_gather(all_indices, indices)
        # dist.all_gather(all_values, values)
        # return torch.zeros_like(gradient).index_add_(0, torch.cat(all_indices), torch.cat(all_values)) / size
        #: end


def power_sgd(matrix: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over all ranks of low rank, and the q to begin the next step with. torch.linalg.qr makes orthonormal."""
    #: solution
    p = matrix @ q
    dist.all_reduce(p)
    p = torch.linalg.qr(p).Q
    q = matrix.T @ p
    dist.all_reduce(q)
    q /= dist.get_world_size()
    return p @ q.T, q
    #: todo p, summed and orthonormal; then q
    #: wrong no-orthonormal
    # p = matrix @ q
    # dist.all_reduce(p)
    # q = matrix.T @ p
    # dist.all_reduce(q)
    # q /= dist.get_world_size()
    # return p @ q.T, q
    #: end


def average_weights(model: nn.Module) -> None:
    """Local SGD's average, after some steps that every rank has taken alone."""
    for parameter in model.parameters():
        #: solution
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()
        #: todo the mean of the ranks' weights
        #: wrong averages-gradients
        # dist.all_reduce(parameter.grad)
        # parameter.grad /= dist.get_world_size()
        #: end


def outer_step(start: Tensor, now: Tensor, momentum: Tensor, lr: float, beta: float) -> Tensor:
    """DiLoCo: start - now is taken as a gradient g; momentum = beta momentum + g; the step is g + beta momentum."""
    #: solution
    gradient = start - now
    momentum.mul_(beta).add_(gradient)
    return start - lr * (gradient + beta * momentum)
    #: todo Nesterov's momentum, from where the round started; momentum changes in place
    #: end
