"""A collective that is under way, and the times that the ledger keeps of it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.ledger import Entry, active_ledger, mark
from lockstep.comm.streams import StreamWork
from lockstep.comm.wire import moves_cuda
from lockstep.layout.group import Group


class Pending:
    """A collective in flight. `wait()` before touching its tensors."""

    def __init__(self, work: dist.Work | None, entry: Entry | None = None, clock: torch.device | None = None) -> None:
        """`clock`: the device whose clock times the entry."""
        self._work, self._entry, self._clock = work, entry, clock or torch.device("cpu")
        self._afterwards: Callable[[], object] | None = None

    def then(self, afterwards: Callable[[], object]) -> "Pending":
        """Call `afterwards` at the end of `wait`."""
        self._afterwards = afterwards
        return self

    @property
    def is_over(self) -> bool:
        """Without waiting."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._work is not None:
            if self._entry is not None and self._entry.wait_started is None:
                self._entry.wait_started = mark(self._clock)
            self._work.wait()
            if self._entry is not None:
                self._entry.wait_ended = mark(self._clock)
            self._work = None
        if self._afterwards is not None:
            self._afterwards()
            self._afterwards = None


def note_end(work: dist.Work, entry: Entry, device: torch.device, group: Group) -> None:
    """Record when a collective of tensors on `device` is done: on the CPU, from the transport's thread.

    NCCL's future runs its callbacks at once, on a separate stream that waits for the collective: an event there
    records when it was done. The output then counts as used by that stream too, and its memory is released a
    little later, so this is done only on request.
    """
    if isinstance(work, StreamWork):
        entry.ended = work.ended
        return
    ledger = active_ledger()
    assert ledger is not None, "it is in one"
    on_gpu = device.type == "cuda" and moves_cuda(group.native)
    if ledger.device.type == "cuda" and not (on_gpu and ledger.sees_ends):
        return  # what the host moves ends on the host's clock, which is not the device's
    clock = ledger.device

    def done(_: Any) -> None:
        entry.ended = mark(clock)

    try:
        future = work.get_future()
    except RuntimeError:  # gloo's send and receive have none: the end is then seen by the thread that waits
        return
    future.add_done_callback(done)
