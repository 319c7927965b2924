"""What the hosts of a group must know of each other in every step, told from host to host, past their GPUs.

A host is ahead of its GPU: it has issued the next kernels long before their turn comes. An answer that comes by NCCL
would make it wait until the GPU has done all that stands before, and then the GPU would have nothing to do until the
host has issued more. Where the group's own messages go from host to host, they serve.
"""

import weakref

import torch
import torch.distributed as dist

from lockstep.comm.collectives import Group, all_reduce
from lockstep.comm.wire import moves_cuda

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def between_hosts(group: Group) -> Group:
    """The same ranks, for CPU tensors. The first time, all of them must call it together."""
    if not dist.is_initialized() or not moves_cuda(group):
        return group
    group = group or dist.group.WORLD
    assert group is not None
    if group not in _groups:
        ranks = dist.get_process_group_ranks(group)
        _groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _groups[group]


def any_rank(here: bool, group: Group) -> bool:
    """Whether it is so on some rank."""
    answer = torch.tensor([float(here)])
    return bool(all_reduce(answer, group=between_hosts(group), purpose="agreement") > 0)
