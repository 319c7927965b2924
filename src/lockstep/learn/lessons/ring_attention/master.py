"""15. Ring attention: online softmax over blocks that travel."""

from math import inf, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

#: solution
PREDICTED_BYTES: int | None = (3 - 1) * 2 * (12 // 3) * 8 * 8
#: skeleton
# PREDICTED_BYTES: int | None = None  # 12 positions, keys and values of width 8, float64, 3 ranks
#: end

Partial = tuple[Tensor, Tensor]
"""(output, lse): of some keys, with the logarithm of the sum of their exponentials."""


def exchange(send: Tensor, to: int, source: int) -> Tensor:
    """Send and receive at the same time."""
    place = torch.empty_like(send)
    operations = [dist.P2POp(dist.isend, send.contiguous(), to), dist.P2POp(dist.irecv, place, source)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return place


def block(q: Tensor, k: Tensor, v: Tensor, q_begin: int, k_begin: int) -> Partial:
    """Causal attention of some queries to some keys; each begins at a position of the whole sequence."""
    scores = q @ k.T / sqrt(q.shape[1])
    #: solution
    places = torch.arange(max(len(k), len(q)), device=q.device)
    later = k_begin + places[: len(k)] > (q_begin + places[: len(q)])[:, None]
    scores = scores.masked_fill(later, -inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[:, None]).exp().nan_to_num(0.0)  # a query that sees none of them
    return weights @ v, lse
    #: todo mask what comes later, then softmax; and its lse
    #: wrong local-mask
    # later = torch.arange(len(k), device=q.device) > torch.arange(len(q), device=q.device)[:, None]
    # scores = scores.masked_fill(later, -inf)
    # lse = scores.logsumexp(-1)
    # weights = (scores - lse[:, None]).exp().nan_to_num(0.0)
    # return weights @ v, lse
    #: end


def merge(one: Partial, other: Partial) -> Partial:
    """Of the keys of both."""
    #: solution
    lse = torch.logaddexp(one[1], other[1])
    parts = [(part_lse - lse).exp()[:, None] * out for out, part_lse in (one, other)]
    return parts[0] + parts[1], lse
    #: todo each in its proportion
    #: wrong plain-mean
    # return (one[0] + other[0]) / 2, torch.logaddexp(one[1], other[1])
    #: end


def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over the whole sequence, of which each rank has a piece of the same length."""
    rank, size, length = dist.get_rank(), dist.get_world_size(), len(q)
    right, left = (rank + 1) % size, (rank - 1) % size
    visiting = torch.stack([k, v])
    result = block(q, k, v, rank * length, rank * length)
    #: solution
    for turn in range(1, size):
        visiting = exchange(visiting, right, left)
        source = (rank - turn) % size
        result = merge(result, block(q, visiting[0], visiting[1], rank * length, source * length))
    #: todo size - 1 turns; whose block is it that visits?
    #: wrong one-short
    # for turn in range(1, size - 1):
    #     visiting = exchange(visiting, right, left)
    #     source = (rank - turn) % size
    #     result = merge(result, block(q, visiting[0], visiting[1], rank * length, source * length))
    #: end
    return result[0]
