"""A group of ranks that communicate: along one axis, or for one purpose. It is never None.

torch.distributed says None for "all ranks", and has no word for "this rank alone". Here both are groups like any other,
so that nobody has to ask; and a group says which axes it spans, so that the ledger can.
"""

from dataclasses import dataclass

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

    @property
    def native(self) -> dist.ProcessGroup:
        """For torch's own functions, where there is somebody to communicate with."""
        assert self.process_group is not None, "a rank alone has nobody to communicate with"
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
