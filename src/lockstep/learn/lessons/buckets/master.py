"""8. Buckets: fewer messages, in the order of backward."""

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

#: solution
PREDICTED_MESSAGES: int | None = 6
#: skeleton
# PREDICTED_MESSAGES: int | None = None  # 16 linear layers of width 64, float64, at most 100,000 bytes each
#: end


def assign(sizes: list[int], cap: int) -> list[list[int]]:
    """Indices of the gradients in each bucket, from the last to the first; `sizes` and `cap` in bytes."""
    #: solution
    buckets: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        if not buckets or filled + sizes[index] > cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets
    #: todo fill each up to the cap, beginning with the last gradient
    #: wrong one-each
    # return [[index] for index in reversed(range(len(sizes)))]
    #: wrong forward-order
    # buckets: list[list[int]] = []
    # filled = 0
    # for index in range(len(sizes)):
    #     if not buckets or filled + sizes[index] > cap:
    #         buckets.append([])
    #         filled = 0
    #     buckets[-1].append(index)
    #     filled += sizes[index]
    # return buckets
    #: end


def reduce(gradients: list[Tensor], buckets: list[list[int]]) -> None:
    """Means over all ranks, in place; one message for each bucket, all of them in flight at once."""
    size = dist.get_world_size()
    #: solution
    flats = [torch.cat([gradients[index].flatten() for index in bucket]) for bucket in buckets]
    works = [dist.all_reduce(flat, async_op=True) for flat in flats]
    for bucket, flat, work in zip(buckets, flats, works, strict=True):
        work.wait()
        flat /= size
        pieces = flat.split([gradients[index].numel() for index in bucket])
        for index, piece in zip(bucket, pieces, strict=True):
            gradients[index].copy_(piece.view_as(gradients[index]))
    #: todo copy into flat tensors, start all, wait for each, copy back
    #: wrong not-copied-back
    # flats = [torch.cat([gradients[index].flatten() for index in bucket]) for bucket in buckets]
    # works = [dist.all_reduce(flat, async_op=True) for flat in flats]
    # for flat, work in zip(flats, works, strict=True):
    #     work.wait()
    #     flat /= size
    #: wrong waits-each
    # for bucket in buckets:
    #     flat = torch.cat([gradients[index].flatten() for index in bucket])
    #     dist.all_reduce(flat)
    #     flat /= size
    #     pieces = flat.split([gradients[index].numel() for index in bucket])
    #     for index, piece in zip(bucket, pieces, strict=True):
    #         gradients[index].copy_(piece.view_as(gradients[index]))
    #: end


def best_cap(caps: list[int], seconds: Callable[[int], float], tries: int = 5) -> int:
    """The cap with the lowest median of `tries` times."""
    #: solution
    return min(caps, key=lambda cap: median(seconds(cap) for _ in range(tries)))
    #: todo the median of several times, not the best of them
    #: end
