"""Which elements of a model a rank counts, where several ranks hold the same ones: each element is counted once, by the
first rank that holds it. Used for the norm of the gradient and for checkpoints.

To gather all regions would put N x P objects on each of N ranks. Instead, four numbers per parameter are gathered:
hashes of its name and of its region, how many elements the rank holds, and how many there are. They show which ranks
hold the same region, and whether regions overlap without being equal (key heads that several tensor-parallel ranks
share); the regions themselves are gathered only for parameters where some overlap.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from lockstep.comm.collectives import all_gather, all_gather_objects, all_reduce
from lockstep.comm.hosts import flag_device
from lockstep.layout.group import Group
from lockstep.layout.region import Box, Region

NAME, REGION, HELD, SIZE = range(4)
"""Columns of the table."""
PADDING = -1


@dataclass
class Counted:
    """The part of what one rank holds that it counts."""

    boxes: dict[str, tuple[Box, ...]]
    """Boxes of each parameter: empty where ranks before this one hold all of it."""
    overlapping: set[str]
    """Parameters of which some ranks' regions overlap without being the same."""
    everywhere: bool
    """Every rank holds all of every parameter."""


def count_once(regions: Mapping[str, Region], group: Group, device: torch.device) -> Counted:
    """Every rank of the group must call it. `device`: the one that the group's ranks compute on."""
    names = list(regions)
    mine = np.array([row_of(name, region) for name, region in regions.items()], dtype=np.int64).reshape(-1, 4)
    table = gather_rows(mine, group, device)
    overlap = overlapping_names(table)
    shared = {name for name, row in zip(names, mine, strict=True) if row[NAME] in overlap}
    earlier = np.isin(mine[:, REGION], table[: group.rank, :, REGION])
    boxes = {n: () if taken else regions[n].boxes for n, taken in zip(names, earlier, strict=True)}
    if overlap:
        everyone = all_gather_objects({name: regions[name] for name in shared}, group)[: group.rank]
        boxes |= {name: regions[name].minus(t[name] for t in everyone if name in t) for name in shared}
    return Counted(boxes, shared, everyone_has_all(table))


def row_of(name: str, region: Region) -> tuple[int, int, int, int]:
    return hash_of(name), hash_of(f"{name} {region.boxes}"), region.numel, prod(region.shape)


def hash_of(text: str) -> int:
    """Positive, in 63 bits, and the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def gather_rows(mine: np.ndarray, group: Group, device: torch.device) -> np.ndarray:
    """All ranks' rows, padded: (ranks, most rows of a rank, columns)."""
    place = flag_device(group, device)
    most = torch.tensor([len(mine)], device=place)
    most = all_reduce(most, torch.distributed.ReduceOp.MAX, group, purpose="regions")
    rows = torch.full((int(most), mine.shape[1]), PADDING, dtype=torch.int64, device=place)
    rows[: len(mine)] = torch.from_numpy(mine).to(place)
    return all_gather(rows, group, purpose="regions").cpu().numpy()


def overlapping_names(table: np.ndarray) -> set[int]:
    """Hashes of names whose distinct regions add up to more elements than the tensor has."""
    rows = table.reshape(-1, table.shape[-1])
    rows = rows[rows[:, NAME] != PADDING]
    _, first = np.unique(rows[:, REGION], return_index=True)
    different = rows[first]
    names, inverse = np.unique(different[:, NAME], return_inverse=True)
    held = np.bincount(inverse, weights=different[:, HELD], minlength=len(names))
    size = np.zeros(len(names))
    size[inverse] = different[:, SIZE]
    return set(names[held > size].tolist())


def everyone_has_all(table: np.ndarray) -> bool:
    names = np.sort(table[:, :, NAME], axis=1)
    whole = (table[:, :, HELD] == table[:, :, SIZE]).all()
    return bool(whole and (names == names[0]).all())
