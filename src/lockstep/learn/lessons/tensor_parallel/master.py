"""13. Tensor parallelism: column, row, vocabulary; sequence parallel."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import gelu

#: solution
PREDICTED_BYTES: float | None = 2 * (2 * (3 - 1) / 3 * 10 * 12 * 8)
#: skeleton
# PREDICTED_BYTES: float | None = None  # an MLP on 10 positions of width 12, float64, 3 ranks, both passes
#: end


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        #: solution
        return summed(gradients[0])
        #: todo every rank has used x: whose gradients add up?
        #: wrong no-backward-sum
        # return gradients[0]
        #: end


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        #: solution
        return summed(x)
        #: todo parts of a sum
        #: end

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def mlp(x: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> Tensor:
    """gelu(x @ A.T) @ B.T + bias; this rank has rows of A (`first`) and the same columns of B (`second`)."""
    #: solution
    hidden = gelu(CopyToRanks.apply(x) @ first.T)
    return SumOfRanks.apply(hidden @ second.T) + bias
    #: todo column parallel, gelu, row parallel; the bias once
    #: wrong bias-each
    # hidden = gelu(CopyToRanks.apply(x) @ first.T)
    # return SumOfRanks.apply(hidden @ second.T + bias)
    #: end


def embedding(tokens: Tensor, rows: Tensor) -> Tensor:
    """Rank r has the rows from r * len(rows) on of the whole table."""
    begin = dist.get_rank() * len(rows)
    #: solution
    mine = (tokens >= begin) & (tokens < begin + len(rows))
    found = rows[torch.where(mine, tokens - begin, 0)] * mine.unsqueeze(-1)
    return SumOfRanks.apply(found)
    #: todo zeros for the tokens of other ranks
    #: wrong no-mask
    # return SumOfRanks.apply(rows[(tokens - begin) % len(rows)])
    #: end


class GatherPositions(torch.autograd.Function):
    """Forward: all ranks' positions (dim 0); backward: sums, of which each rank gets its own positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        whole = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous())
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return ScatterSums.forward(ctx, gradients[0])


class ScatterSums(torch.autograd.Function):
    """The mirror."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mine = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
        dist.reduce_scatter_tensor(mine, x.contiguous())
        return mine

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return GatherPositions.forward(ctx, gradients[0])


def mlp_sequence(x: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> Tensor:
    """The same, where x and the result are this rank's positions only."""
    #: solution
    hidden = gelu(GatherPositions.apply(x) @ first.T)
    return ScatterSums.apply(hidden @ second.T) + bias
    #: todo gather before, scatter after
    #: end
