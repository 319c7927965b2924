"""12. ZeRO 3 and FSDP: gather, free, prefetch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: solution
PREDICTED_BYTES: float | None = 3 * (3 - 1) / 3 * 4 * 12 * 12 * 8
#: skeleton
# PREDICTED_BYTES: float | None = None  # 4 layers of 12 by 12 float64 on 3 ranks, forward and backward
#: end

Handle = tuple[Tensor, Any]


def start_gather(shard: Tensor) -> Handle:
    """Rows of the weight from all ranks, in flight: the place where they arrive, and a work to wait for."""
    whole = shard.new_empty(dist.get_world_size() * shard.shape[0], shard.shape[1])
    return whole, dist.all_gather_into_tensor(whole, shard.contiguous(), async_op=True)


def finish_gather(handle: Handle) -> Tensor:
    whole, work = handle
    work.wait()
    return whole


def scatter_mean(gradient: Tensor) -> Tensor:
    """Of the whole weight's gradient: the mean over all ranks, of this rank's rows."""
    size = dist.get_world_size()
    mine = gradient.new_empty(gradient.shape[0] // size, gradient.shape[1])
    #: solution
    dist.reduce_scatter_tensor(mine, gradient.contiguous())
    return mine / size
    #: todo reduce-scatter, and the mean
    #: wrong sum
    # dist.reduce_scatter_tensor(mine, gradient.contiguous())
    # return mine
    #: end


class GatheredLinear(torch.autograd.Function):
    """x @ weight.T, where this rank has a shard of the weight's rows; `weight` has been gathered for forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, weight: Tensor) -> Tensor:
        #: solution
        ctx.save_for_backward(x, shard)
        #: todo keep what backward needs, and no more
        #: wrong keeps-weight
        # ctx.save_for_backward(x, weight)
        #: end
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Of x, and of the shard."""
        gradient = gradients[0]
        #: solution
        x, shard = ctx.saved_tensors
        weight = finish_gather(start_gather(shard))
        #: todo put the weight together again
        #: wrong keeps-weight
        # x, weight = ctx.saved_tensors
        #: end
        return gradient @ weight, scatter_mean(gradient.T @ x), None


def forward_all(x: Tensor, shards: list[Tensor], activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(GatheredLinear(...)) of one layer after the other; the next gather is in flight meanwhile."""
    #: solution
    handle = start_gather(shards[0].detach())
    for index, shard in enumerate(shards):
        weight = finish_gather(handle)
        if index + 1 < len(shards):
            handle = start_gather(shards[index + 1].detach())
        x = activation(GatheredLinear.apply(x, shard, weight))
    return x
    #: todo start the first; then wait, start the next, compute
    #: wrong no-prefetch
    # for shard in shards:
    #     weight = finish_gather(start_gather(shard.detach()))
    #     x = activation(GatheredLinear.apply(x, shard, weight))
    # return x
    #: end
