"""Where this process stands among the ranks: its numbers and its device."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This rank among all ranks. At size 1 there is no process group and nothing to communicate."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")
    backend: str = "none"
    ranks_on_device: int = 1
    """More than one where ranks share a GPU."""
    timeout: float = 300.0
    """Seconds after which a rank that does not answer is an error."""
    restarts: int = 0
    """How often the ranks of this launch have been started anew."""
    launch: str | None = None
    """What these attempts have in common; None: there is only one."""
    keeps_going: bool = False
    """Ranks may be lost at any moment, and the others go on: whatever waits for them must be interruptible."""
    group: dist.ProcessGroup | None = None
    """All ranks, by another backend than the world's own; None: by the world's own."""

    @property
    def is_main(self) -> bool:
        """Rank 0 prints, draws progress and writes files."""
        return self.rank == 0


MARGIN = 5.0
"""Seconds by which torch's own time-out is longer than ours, which explains a hang before torch's would end it."""


def collective_timeout(timeout: float) -> timedelta:
    """What torch's groups are given."""
    return timedelta(seconds=timeout + MARGIN)


def torch_backend(name: str) -> str:
    """What torch is to make a group with. Hosts of ranks on GPUs communicate too."""
    return "cpu:gloo,cuda:nccl" if name == "nccl" else name
