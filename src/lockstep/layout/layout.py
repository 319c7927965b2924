"""The layout: which rank does what, and who communicates with whom, for each purpose.

Ranks are numbered through the axes with the last one running fastest. With pp=2, shard=2, tp=2:

    pp 0                            pp 1
    shard 0        shard 1          shard 0        shard 1
    tp 0    tp 1   tp 0    tp 1     tp 0    tp 1   tp 0    tp 1
    rank 0  rank 1 rank 2  rank 3   rank 4  rank 5 rank 6  rank 7

A group joins the ranks that differ in some axes only:

    batch      replicate, shard             who reads different samples
    loss       pp, replicate, shard, cp     whose sums make the loss of the global batch (the last stage contributes)
    gradient   replicate, shard, cp         who has a gradient of the same parameter
    norm       all                          whose squares make the gradient's norm
"""

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lockstep.layout.degrees import AXES, Degrees
from lockstep.layout.group import ALONE, Group, shared_group
from lockstep.layout.world import World, collective_timeout, torch_backend

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PURPOSES = {
    "batch": ("replicate", "shard"),
    "loss": ("pp", "replicate", "shard", "cp"),
    "gradient": ("replicate", "shard", "cp"),
    "norm": AXES,
}


class Layout:
    """Degrees laid over the ranks of a world. All its ranks make it together."""

    def __init__(self, world: World, degrees: Degrees) -> None:
        """Degrees of 1 only, in a world of several ranks: each does all the work by itself."""
        alone = degrees == Degrees()
        self.world, self.degrees = world, degrees if alone else degrees.resolve(world.size)
        self._degree = self.degrees.by_axis()
        self.coordinates = dict(zip(AXES, coordinates(world.rank, self.degrees), strict=True))
        """Of this rank."""
        self._groups: dict[tuple[str, ...], Group] = {}
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        for axes in [*((axis,) for axis in AXES), ("shard", "cp"), *PURPOSES.values()]:  # in one order on every rank
            spanned = self._spanned(axes)
            if spanned not in self._groups:
                self._groups[spanned] = self._make_group(spanned)
        self.batch, self.loss, self.gradient, self.norm = (self.group(*axes) for axes in PURPOSES.values())

    def group(self, *axes: str) -> Group:
        """The ranks that differ from this one in these axes only."""
        return self._groups[self._spanned(axes)]

    def experts(self, ep: int, over_tp: bool) -> tuple[Group, Group, Group]:
        """(the ranks that share the experts, those that hold the same ones, all of them). Experts are folded over the
        ranks that hold replicas of the dense parts, and `over_tp` over the tp ranks too: neighbours share the experts.
        """
        axes = ("replicate", "shard", "cp", *(("tp",) if over_tp else ()))
        if ep == 1:
            return ALONE, self.gradient, self.group(*axes)
        ranks = self._ranks(axes)
        block, place = divmod(ranks.index(self.world.rank), ep)
        return (
            self._group_of("ep", ranks[block * ep : (block + 1) * ep]),
            self._group_of("replicas of experts", ranks[place::ep]),
            self._group_of(" x ".join(self._spanned(axes)), ranks),
        )

    def _group_of(self, axis: str, ranks: list[int]) -> Group:
        if len(ranks) == 1:
            return ALONE
        whole = self.world.group or dist.group.WORLD  # by the backend that this world has chosen, or the first one
        made = whole if len(ranks) == self.world.size else self._new_group(ranks, axis)
        assert made is not None
        return Group(axis, ranks.index(self.world.rank), len(ranks), made)

    def _spanned(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """An axis of degree 1 joins no ranks."""
        return tuple(axis for axis in AXES if axis in axes and self._degree[axis] > 1)

    def _make_group(self, axes: tuple[str, ...]) -> Group:
        if not axes:
            return ALONE
        return self._group_of(" x ".join(axes), self._ranks(axes))

    def _new_group(self, ranks: list[int], axes: str = "alone") -> dist.ProcessGroup:
        return shared_group(
            ranks, torch_backend(self.world.backend), collective_timeout(self.world.timeout), description=axes
        )

    def _ranks(self, axes: tuple[str, ...]) -> list[int]:
        """Numbers of the ranks that have this rank's coordinates but in these axes."""
        choices = [range(self._degree[a]) if a in axes else [self.coordinates[a]] for a in AXES]
        return [self._number(place) for place in product(*choices)]

    def _number(self, place: tuple[int, ...]) -> int:
        number = 0
        for axis, index in zip(AXES, place, strict=True):
            number = number * self._degree[axis] + index
        return number

    def mesh(self, *axes: str, through: Callable[[Group], dist.ProcessGroup] | None = None) -> "DeviceMesh":
        """A mesh of these axes, or of all that cut anything, for engines that take one; "shard x cp" is both as one.
        Its groups are ours: left to itself, torch would make them on the world's first backend. `through`: what the
        engine communicates through instead of a group's own process group.
        """
        from torch.distributed.device_mesh import DeviceMesh  # slow to import

        axes = axes or self._spanned(AXES)
        if axes in self._meshes:  # who shares a mesh must share the object
            return self._meshes[axes]
        groups = [self.group(*axis.split(" x ")) for axis in axes]
        made = through or (lambda group: group.native)
        native = [made(group) if group.size > 1 else self._new_group([self.world.rank]) for group in groups]
        spanned = tuple(name for axis in axes for name in axis.split(" x "))
        numbers = torch.tensor(self._ranks(spanned)).view([g.size for g in groups])
        given = native[0] if len(native) == 1 else native
        names = tuple(axis.split(" x ")[0] for axis in axes)
        self._meshes[axes] = DeviceMesh.from_group(given, self.world.device.type, numbers, mesh_dim_names=names)
        return self._meshes[axes]

    def seed(self, base: int) -> int:
        """Of this rank's random numbers in training: other ones where ranks hold other samples, positions or layers,
        the same ones where they compute with parts of the same tensors (tp).
        """
        without_tp = self.world.rank // self.degrees.tp
        return base + without_tp


def coordinates(rank: int, degrees: Degrees) -> tuple[int, ...]:
    """Of a rank, one per axis."""
    found = []
    for degree in reversed(degrees.by_axis().values()):
        rank, index = divmod(rank, degree)
        found.append(index)
    return tuple(reversed(found))
