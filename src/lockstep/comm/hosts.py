"""What the hosts of a group must know of each other, sent from host to host, past their GPUs.

A host is ahead of its GPU: it has issued the next kernels long before their turn comes. An answer that comes by NCCL
would make it wait until the GPU has done all that stands before, and then the GPU would have nothing to do until the
host has issued more. So the groups that we make of ranks on GPUs move CPU tensors too (`torch_backend` in
`layout/world.py`).
"""

import torch
import torch.distributed as dist

from lockstep.comm.collectives import all_reduce
from lockstep.layout.group import Group, GroupLike, group_of


def flag_device(group: Group, device: torch.device) -> torch.device:
    """Where ranks that compute on `device` keep what they send each other: on their hosts, unless a caller made
    the group, and made it for GPUs only.
    """
    only_gpus = group.process_group is not None and "cpu:" not in dist.get_backend_config(group.process_group)
    return device if only_gpus else torch.device("cpu")


def any_rank(here: bool, device: torch.device, group: GroupLike = None) -> bool:
    """Whether it is so on some rank."""
    return sum_over_ranks(float(here), device, group) > 0


def sum_over_ranks(here: float, device: torch.device, group: GroupLike = None) -> float:
    """Of one number of each rank; the ranks compute on `device`."""
    group = group_of(group)
    answer = torch.tensor([here], device=flag_device(group, device))
    return float(all_reduce(answer, group=group, purpose="agreement"))


def hosts_meet(device: torch.device, group: GroupLike = None) -> None:
    """Return when every rank has come here. Nothing waits on a GPU: ranks may share one, and a kernel that waits takes
    room from those that compute.
    """
    any_rank(False, device, group)
