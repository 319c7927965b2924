"""What the processes of a group must agree on, all-reduced between their hosts rather than through the GPUs.

A host runs ahead of its GPU: it issues kernels long before they run. To read a result that comes over NCCL it would
have to wait until the GPU has run everything that was queued before, and then the GPU would idle until the
host has issued more. So the groups that we make for ranks on GPUs have a CPU backend too (`torch_backend` in
`layout/world.py`).
"""

import torch
import torch.distributed as dist

from lockstep.comm.collectives import all_reduce
from lockstep.layout.group import Group, GroupLike, group_of


def flag_device(group: Group, device: torch.device) -> torch.device:
    """The device of what the hosts send each other, where ranks compute on `device`: the CPU, unless the caller gave
    a group that has a backend for GPUs only.
    """
    only_gpus = group.process_group is not None and "cpu:" not in dist.get_backend_config(group.process_group)
    if only_gpus and device.type == "cpu":  # of a loop whose optimizer's state is on the CPU
        return torch.device("cuda", torch.cuda.current_device())
    return device if only_gpus else torch.device("cpu")


def any_rank(here: bool, device: torch.device, group: GroupLike = None) -> bool:
    """Whether `here` is true on any rank."""
    return sum_over_ranks(float(here), device, group) > 0


def sum_over_ranks(here: float, device: torch.device, group: GroupLike = None) -> float:
    """The sum of one number per rank. `device`: the one that the ranks compute on."""
    group = group_of(group)
    answer = torch.tensor([here], device=flag_device(group, device))
    return float(all_reduce(answer, group=group, purpose="agreement"))


def hosts_meet(device: torch.device, group: GroupLike = None) -> None:
    """A barrier between the hosts. No kernel waits on a GPU: ranks may share one, and a kernel that waits takes
    room from those that compute.
    """
    any_rank(False, device, group)
