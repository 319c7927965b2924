"""Counted collectives: torch.distributed's, each writing itself into the ledger.

Every function works on a world of one rank without a process group, where it does nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.ledger import Entry, active_ledger, mark

Group = dist.ProcessGroup | None

# torch 2.13 renames it and warns at the old name; 2.11 and 2.12 have the old one only.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def group_size(group: Group = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def group_rank(group: Group = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


class Pending:
    """A collective on its way. `wait()` before touching its tensors."""

    def __init__(self, work: dist.Work | None, entry: Entry | None = None, device: torch.device | None = None) -> None:
        self._work, self._entry, self._device = work, entry, device or torch.device("cpu")
        if work is not None and entry is not None and self._device.type == "cpu":
            note_end(work, entry)

    def wait(self) -> None:
        if self._work is None:
            return
        if self._entry is not None:
            self._entry.wait_started = mark(self._device)
        self._work.wait()
        if self._entry is not None:
            self._entry.wait_ended = mark(self._device)
        self._work = None


def note_end(work: dist.Work, entry: Entry) -> None:
    """Have the transport's own thread write down when a CPU collective was done."""

    def done(_: Any) -> None:
        entry.ended = mark(torch.device("cpu"))

    work.get_future().add_done_callback(done)


def _issue(
    operation: str, purpose: str, payload: Tensor, group: Group, start: Callable[[], dist.Work | None]
) -> Pending:
    if group_size(group) == 1:
        return Pending(None)
    ledger = active_ledger()
    entry = ledger.add(operation, purpose, group_size(group), payload.nbytes) if ledger is not None else None
    return Pending(start(), entry, payload.device)


def all_reduce_async(tensor: Tensor, purpose: str, group: Group = None, op: Any = dist.ReduceOp.SUM) -> Pending:
    """Begin to sum `tensor` over the ranks, in place."""
    return _issue(
        "all_reduce",
        purpose,
        tensor,
        group,
        lambda: dist.all_reduce(tensor, op=op, group=group, async_op=True),
    )


def all_reduce(tensor: Tensor, purpose: str, group: Group = None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Sum `tensor` over the ranks, in place."""
    all_reduce_async(tensor, purpose, group, op).wait()
    return tensor


def broadcast(tensor: Tensor, purpose: str, group: Group = None) -> Tensor:
    """Copy the group's first rank's `tensor` to all, in place."""
    _issue(
        "broadcast",
        purpose,
        tensor,
        group,
        lambda: dist.broadcast(tensor, group=group, group_src=0, async_op=True),
    ).wait()
    return tensor


def all_gather_async(tensor: Tensor, purpose: str, group: Group = None) -> tuple[Tensor, Pending]:
    """Begin to collect every rank's `tensor` (all of one shape): (ranks, *shape)."""
    size = group_size(group)
    gathered = tensor.new_empty((size, *tensor.shape))
    if size == 1:
        gathered[0] = tensor
    flat = gathered.view(size * tensor.numel()) if tensor.numel() else gathered.view(-1)
    pending = _issue(
        "all_gather",
        purpose,
        gathered,
        group,
        lambda: _all_gather_single(flat, tensor.reshape(-1), group=group, async_op=True),
    )
    return gathered, pending


def all_gather(tensor: Tensor, purpose: str, group: Group = None) -> Tensor:
    """Every rank's `tensor` (all of one shape): (ranks, *shape)."""
    gathered, pending = all_gather_async(tensor, purpose, group)
    pending.wait()
    return gathered


def all_gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Every rank's `value`, pickled. For the odd report, not for the step."""
    values = [value] * group_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values
