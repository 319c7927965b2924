"""A group of ranks that communicate: along one axis, or for one purpose. It is never None.

torch.distributed says None for "all ranks", and has no word for "this rank alone". Here both are groups like any other,
so that no caller has to ask; and a group says which axes it spans, so that the ledger can.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """`size` ranks, of which this one is number `rank`."""

    axis: str
    """The axes that it spans: "shard", "replicate x shard"; nothing for a rank alone."""
    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    """torch's; None for a rank alone."""

    def __deepcopy__(self, _: object) -> "Group":
        """A copy of a module that is cut communicates with the same ranks."""
        return self

    @property
    def native(self) -> dist.ProcessGroup:
        """For torch's functions, where there is another rank to communicate with."""
        assert self.process_group is not None, "a rank alone has no other to communicate with"
        return self.process_group

    @property
    def backend(self) -> str:
        return "none" if self.process_group is None else dist.get_backend(self.process_group)


ALONE = Group("")
"""A rank by itself: every collective over it is nothing to do."""

GroupLike = Group | dist.ProcessGroup | None
"""What users may give: a group of ours, one of torch's, or None, as torch has it, for all ranks."""


def group_of(given: GroupLike = None, axis: str = "world") -> Group:
    """Whatever was given, as a group. `axis`: what to call one that does not say it itself."""
    if isinstance(given, Group):
        return given
    if given is None:
        if not dist.is_initialized():
            return ALONE
        given = dist.group.WORLD
    return Group(axis, dist.get_rank(given), dist.get_world_size(given), given)


def replicas_of(parameter: Any, others: Group) -> Group:
    """The ranks that hold copies of a parameter: `others`, which hold copies of the model, unless it says so itself (an
    expert has fewer copies).
    """
    found: Group = getattr(parameter, "replicas", others)
    return found


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def shared_group(
    ranks: Sequence[int],
    backend: str,
    timeout: timedelta | None = None,
    lane: str = "",
    options: Any = None,
    description: str | None = None,
) -> dist.ProcessGroup:
    """torch's group of these ranks, made once and shared by all who ask for it; its members ask in the same order.

    A communicator costs memory, and on a GPU a stream of which only so many are independent of each other: models that
    are measured in turns must not each have their own. `lane`: groups whose messages must not wait for each other.
    `description`: the axes, for the report of a hang.
    """
    world = dist.group.WORLD
    assert world is not None, "ranks have been started"
    made, key = _made.setdefault(world, {}), (tuple(ranks), backend, timeout, lane)
    if key not in made:
        # Other ranks of a larger world know nothing of this group.
        made[key] = dist.new_group(
            list(ranks),
            timeout,
            backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=description or lane or None,
        )
    return made[key]
