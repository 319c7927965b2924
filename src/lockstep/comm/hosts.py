"""What the hosts of a group must know of each other in every step, told from host to host, past their GPUs.

A host is ahead of its GPU: it has issued the next kernels long before their turn comes. An answer that comes by NCCL
would make it wait until the GPU has done all that stands before, and then the GPU would have nothing to do until the
host has issued more. So the groups that we make of ranks on GPUs move CPU tensors too (`world.py: torch_backend`).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.collectives import Group, all_reduce

CPU = torch.device("cpu")


def moves_cpu(group: Group) -> bool:
    """A group that somebody else made for GPUs may not."""
    return "cpu:" in dist.get_backend_config(group)


def flag_device(group: Group, device: torch.device) -> torch.device:
    """Where ranks that compute on `device` keep what their hosts tell each other."""
    return device if dist.is_initialized() and not moves_cpu(group) else CPU


def asks_hosts(payload: Tensor, group: Group) -> bool:
    """Whether an answer that comes back with `payload` would be had sooner from the hosts."""
    return payload.is_cuda and moves_cpu(group)


def any_rank(here: bool, group: Group) -> bool:
    """Whether it is so on some rank."""
    return bool(all_reduce(torch.tensor([float(here)]), group=group, purpose="agreement") > 0)
