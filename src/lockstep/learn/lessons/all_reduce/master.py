"""4. All-reduce from scratch: naive, tree and ring, and when which is faster."""

from math import ceil, log2

import torch
import torch.distributed as dist
from torch import Tensor

#: solution
PREDICTED_BYTES: float | None = 2 * (4 - 1) / 4 * 1000 * 8
#: skeleton
# PREDICTED_BYTES: float | None = None  # sent by one rank: ring, 4 ranks, 1,000 float64
#: end


def exchange(send: Tensor, to: int, receive: Tensor, source: int) -> None:
    """Send and receive at the same time."""
    operations = [dist.P2POp(dist.isend, send.contiguous(), to), dist.P2POp(dist.irecv, receive, source)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def naive(tensor: Tensor) -> None:
    """All send to rank 0, which adds up and sends the sum back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    #: solution
    if rank == 0:
        place = torch.empty_like(tensor)
        for other in range(1, size):
            dist.recv(place, other)
            tensor += place
        for other in range(1, size):
            dist.send(tensor, other)
    else:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
    #: todo to rank 0, and back
    #: end


def tree(tensor: Tensor) -> None:
    """Pairs add up, then pairs of pairs, until rank 0 has the sum; and back the same way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    distances = [1 << level for level in range(ceil(log2(size)))]  # 1, 2, 4: to the partner in each round
    #: solution
    place = torch.empty_like(tensor)
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            dist.recv(place, rank + distance)
            tensor += place
    for distance in reversed(distances):
        if rank % (2 * distance) == distance:
            dist.recv(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            dist.send(tensor, rank + distance)
    #: todo up the tree, and down again
    #: end


def ring(tensor: Tensor) -> None:
    """Reduce-scatter, then all-gather, each in size - 1 turns."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = list(tensor.tensor_split(size))  # views: what is written to them is written to the tensor
    #: solution
    for turn in range(size - 1):
        mine, other = chunks[(rank - turn) % size], chunks[(rank - turn - 1) % size]
        place = torch.empty_like(other)
        exchange(mine, right, place, left)
        other += place
    for turn in range(size - 1):
        exchange(chunks[(rank - turn + 1) % size], right, chunks[(rank - turn) % size], left)
    #: todo two rounds of size - 1 turns
    #: wrong half
    # for turn in range(size - 1):
    #     mine, other = chunks[(rank - turn) % size], chunks[(rank - turn - 1) % size]
    #     place = torch.empty_like(other)
    #     exchange(mine, right, place, left)
    #     other += place
    #: wrong whole-tensor
    # passing, place = tensor.clone(), torch.empty_like(tensor)
    # for _ in range(size - 1):
    #     exchange(passing, right, place, left)
    #     tensor += place
    #     passing, place = place, passing
    #: wrong same-neighbour
    # for turn in range(size - 1):
    #     mine, other = chunks[(rank - turn) % size], chunks[(rank - turn - 1) % size]
    #     place = torch.empty_like(other)
    #     exchange(mine, 1 if rank != 1 else 0, place, left)
    #     other += place
    #: wrong blocking
    # for turn in range(size - 1):
    #     mine, other = chunks[(rank - turn) % size], chunks[(rank - turn - 1) % size]
    #     place = torch.empty_like(other)
    #     dist.send(mine.contiguous(), right)
    #     dist.recv(place, left)
    #     other += place
    #: end


def ring_seconds(ranks: int, nbytes: float, latency: float, bandwidth: float) -> float:
    #: solution
    return 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth)
    #: todo how many messages follow each other, and how long is each?
    #: end


def tree_seconds(ranks: int, nbytes: float, latency: float, bandwidth: float) -> float:
    #: solution
    return 2 * ceil(log2(ranks)) * (latency + nbytes / bandwidth)
    #: todo how many rounds, and what does each carry?
    #: end


def crossing(ranks: int, latency: float, bandwidth: float) -> float:
    """The size in bytes from which on the ring is faster than the tree; for more than 3 ranks."""
    #: solution
    rounds = ceil(log2(ranks))
    return latency * bandwidth * (ranks - 1 - rounds) / (rounds - (ranks - 1) / ranks)
    #: todo where both take the same time
    #: end
