"""Watching engines that we did not write: each collective is noted and passed on.

    ObservedGroup   PyTorch's DDP takes any process group, also one written in Python. This one hands every call to the
                    real group and returns the real group's work
    observed        around a collective that an engine lets us issue for it (FSDP2), done when the call returns: for the
                    host, or on a GPU for the engine's stream
    note_calls      on an object of which an engine calls methods that communicate (DeepSpeed)

The engine runs its own code at its own speed; only the ledger knows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.collectives import note_end
from lockstep.comm.ledger import Entry, active_ledger, mark
from lockstep.layout.group import Group, group_of


class ObservedGroup(dist.ProcessGroup):
    """Delegates to `inner`, noting what is issued. The engine waits in C++, out of sight: see `waits_until_now`."""

    def __init__(self, group: Group, broadcasts: str) -> None:
        """`broadcasts`: the purpose of the engine's broadcasts, which do not say what they are for."""
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]
        self.group, self.inner, self.broadcasts = group, group.native, broadcasts
        self._open: list[Entry] = []

    def _note(self, operation: str, purpose: str, tensors: list[torch.Tensor], work: dist.Work) -> dist.Work:
        ledger = active_ledger()
        if ledger is not None:
            entry = ledger.add(operation, purpose, self.group, sum(t.nbytes for t in tensors))
            if purpose == "gradients":
                entry.subject = f"bucket {len(self._open)}"
                self._open.append(entry)
            note_end(work, entry, tensors[0].device, self.group)
        return work

    def waits_until_now(self, device: torch.device) -> None:
        """Close the books on a backward pass that has just returned.

        The engine launches a collective as soon as its gradients are there and waits for all at the end of backward:
        from the last launch on there is nothing left to compute, and the rest of backward is exposed.
        """
        ends = [entry.ended for entry in self._open if isinstance(entry.ended, float)]
        seen = ends and len(ends) == len(self._open)
        over = max(ends) if seen else mark(device)
        for entry in self._open:
            entry.wait_started, entry.wait_ended = self._open[-1].issued, over
        self._open = []

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._note("all_reduce", "gradients", tensors, self.inner.allreduce(tensors, opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._note("broadcast", self.broadcasts, tensors, self.inner.broadcast(tensors, opts))

    # Set-up only.

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self.inner.allgather(outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.inner.barrier(opts)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "observed"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.inner.group_name


@contextmanager
def observed(operation: str, purpose: str, tensor: torch.Tensor, group: Group) -> Iterator[None]:
    ledger = active_ledger()
    entry = ledger.add(operation, purpose, group, tensor.nbytes) if ledger is not None else None
    yield
    if entry is not None:
        entry.ended = mark(tensor.device)
        if tensor.device.type == "cpu":
            entry.wait_started, entry.wait_ended = entry.issued, entry.ended


Watched = dict[str, tuple[str, str, int]]
"""Method -> (operation, purpose, which argument is the whole array)."""


def note_calls(target: Any, watched: Watched, axis: str) -> None:
    """Have these methods of `target` write themselves into the ledger; asked for again, it does nothing."""
    if getattr(target, "noted_by_lockstep", False):
        return
    target.noted_by_lockstep = True
    for name, (operation, purpose, position) in watched.items():
        setattr(target, name, _noting(getattr(target, name), operation, purpose, position, axis))


def _noting(call: Any, operation: str, purpose: str, position: int, axis: str) -> Any:
    names = ("output_tensor", "input_tensor") if operation in ("all_gather", "reduce_scatter") else ("tensor",)

    def noted(*args: Any, **kwargs: Any) -> Any:
        ledger = active_ledger()
        if ledger is not None:
            tensor = args[position] if len(args) > position else kwargs[names[position]]
            group = group_of(kwargs.get("group"), axis)
            small = tensor.numel() <= 1  # the norm
            if group.size > 1:
                entry = ledger.add(operation, "norm" if small else purpose, group, tensor.nbytes)
                work = call(*args, **kwargs)
                if work is not None:
                    note_end(work, entry, tensor.device, group)
                elif tensor.device.type == "cpu":
                    entry.wait_started, entry.wait_ended = entry.issued, mark(tensor.device)
                return work
        return call(*args, **kwargs)

    return noted
