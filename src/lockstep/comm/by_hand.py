"""All-reduce by one of our own algorithms, as a call like torch.distributed's."""

import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.comm.algorithms import ALGORITHMS
from lockstep.comm.cost import choose
from lockstep.comm.lane import Lane
from lockstep.comm.reduction import reduction
from lockstep.comm.streams import on_its_stream
from lockstep.comm.wire import Wire, moves_cuda, staging
from lockstep.errors import UserError

ALGORITHM_NAMES = ("native", *ALGORITHMS, "auto")

_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, Lane] = weakref.WeakKeyDictionary()


def check_algorithm(name: str) -> None:
    if name not in ALGORITHM_NAMES:
        raise UserError(f"algorithm is {name!r}, but it must be one of {', '.join(ALGORITHM_NAMES)}")


def all_reduce_over(wire: Wire, tensor: Tensor, algorithm: str, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce in place over a wire; returns when it is done."""
    combine, average = reduction(op, tensor.dtype)
    staged = staging(tensor, wire.group).contiguous()
    flat = staged.view(-1)
    if algorithm == "auto":
        algorithm = choose(wire, flat.nbytes)
    ALGORITHMS[algorithm](wire, flat, combine)
    if average:
        flat.div_(wire.size)
    if staged.data_ptr() != tensor.data_ptr():
        tensor.copy_(staged)


def all_reduce_by_hand(
    tensor: Tensor, algorithm: str, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> dist.Work:
    """Begin to reduce in place. On the CPU a thread does it, in the order of the calls; on a GPU, a stream."""
    check_algorithm(algorithm)
    wire = Wire(group)
    data = tensor.detach()
    if data.is_cuda and moves_cuda(group):
        return on_its_stream(wire.group, data.device, lambda: all_reduce_over(wire, data, algorithm, op))
    reduction(op, data.dtype)  # raises here, in the caller, not on the lane
    if wire.group not in _lanes:
        _lanes[wire.group] = Lane("all-reduce by hand")
        weakref.finalize(wire.group, _lanes[wire.group].close).atexit = False
    return _lanes[wire.group].submit(lambda: all_reduce_over(wire, data, algorithm, op), [tensor])
