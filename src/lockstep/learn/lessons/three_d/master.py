"""16. Three dimensions: the axes on a mesh, what they cost, and a layout for a real model."""

from math import prod
from typing import Any

import torch.distributed as dist

Sizes = dict[str, int]
"""Ranks of each axis, the outermost first: {"pp": 2, "dp": 4, "tp": 2}."""
#: solution
PREDICTED_GIGABYTES: float | None = 7 / 4 * (2 + 2 + 12 / 4)
CHOSEN: str | None = "dp=4,tp=2,pp=2,zero=1"
#: skeleton
# PREDICTED_GIGABYTES: float | None = None  # 7 billion parameters, pp 2, dp 4, tp 2
# CHOSEN: str | None = None  # what you would give to lockstep plan --fix: "dp=...,tp=...,pp=...,zero=..."
#: end


def coordinates(rank: int, sizes: Sizes) -> dict[str, int]:
    """The last axis changes fastest."""
    place = {}
    #: solution
    for axis in reversed(sizes):
        rank, place[axis] = divmod(rank, sizes[axis])
    #: todo like seconds, minutes, hours
    #: wrong tp-outermost
    # for axis in sizes:
    #     rank, place[axis] = divmod(rank, sizes[axis])
    #: end
    return {axis: place[axis] for axis in sizes}


def peers(rank: int, axis: str, sizes: Sizes) -> list[int]:
    """Ranks that differ from this one along the axis only, in order, this one among them."""
    mine = coordinates(rank, sizes)
    #: solution
    others = range(prod(sizes.values()))
    return [r for r in others if all(c == mine[a] for a, c in coordinates(r, sizes).items() if a != axis)]
    #: todo the same place on all other axes
    #: end


def make_groups(sizes: Sizes) -> dict[str, Any]:
    """For every axis the process group of this rank."""
    mine = {}
    for axis in sizes:
        #: solution
        lists = dict.fromkeys(tuple(peers(rank, axis, sizes)) for rank in range(prod(sizes.values())))
        for ranks in lists:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                mine[axis] = group
        #: todo all ranks make all groups, in the same order
        #: wrong own-groups-only
        # mine[axis] = dist.new_group(peers(dist.get_rank(), axis, sizes))
        #: end
    return mine


def memory(parameters: float, sizes: Sizes) -> float:
    """Bytes that a rank holds: bf16 weights and gradients, 12 bytes of optimizer state sharded over dp (ZeRO 1)."""
    #: solution
    return parameters / (sizes["tp"] * sizes["pp"]) * (2 + 2 + 12 / sizes["dp"])
    #: todo which axis cuts what?
    #: wrong forgets-the-shard
    # return parameters / (sizes["tp"] * sizes["pp"]) * (2 + 2 + 12)
    #: end


def gradient_bytes(parameters: float, sizes: Sizes) -> float:
    """That a rank sends along dp in a step: bf16 gradients, by a ring."""
    #: solution
    n = sizes["dp"]
    return 2 * (n - 1) / n * 2 * parameters / (sizes["tp"] * sizes["pp"])
    #: todo the ring's law, on what this rank holds
    #: end
