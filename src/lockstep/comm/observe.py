"""Observes engines that we did not write: each collective is recorded in the ledger and passed on.

    ObservedGroup   a process group written in Python that forwards every call to the real one: for DDP, which accepts
                    any, and through `observed_group` for DTensor's meshes and torch's pipelines
    observed        around a collective that an engine lets us issue for it (FSDP2), done when the call returns: for the
                    host, or on a GPU for the engine's stream
    note_calls      wraps the methods of an object through which an engine communicates (DeepSpeed)

The engine runs unchanged, at full speed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.ledger import Entry, Ledger, active_ledger, mark
from lockstep.comm.pending import note_end
from lockstep.layout.group import Group, group_of, shared_group


class ObservedGroup(dist.ProcessGroup):
    """Delegates to a group's own process group, noting what is issued and how long it is waited for."""

    def __init__(self, group: Group, purpose: str, sees_waits: bool = True) -> None:
        """`purpose`: what the ledger files the engine's collectives under. `sees_waits`: whether the stream that
        waits for them is the compute stream.
        """
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]
        self.group, self.inner, self.purpose, self.sees_waits = group, group.native, purpose, sees_waits

    def _observe(
        self, operation: str, nbytes: int, tensor: torch.Tensor, start: Callable[[], dist.Work | None]
    ) -> dist.Work | None:
        """`start`: issues it. NCCL runs what is not asynchronous on the compute stream, and returns nothing."""
        ledger = active_ledger()
        if ledger is None:
            return start()
        entry = self._entry(ledger, operation, nbytes)
        work = start()
        if work is None:
            entry.wait_started, entry.wait_ended = entry.issued, mark(ledger.device)
            entry.ended = entry.wait_ended
            return None
        note_end(work, entry, tensor.device, self.group)
        return ObservedWork(work, entry, ledger.device) if self.sees_waits else work

    def _entry(self, ledger: Ledger, operation: str, nbytes: int) -> Entry:
        return ledger.add(operation, self.purpose, self.group, nbytes)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        start = partial(self.inner.allreduce, tensors, opts)
        return self._observe("all_reduce", total_bytes(tensors), tensors[0], start)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        start = partial(self.inner.allreduce_coalesced, tensors, opts)
        return self._observe("all_reduce", total_bytes(tensors), tensors[0], start)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        start = partial(self.inner.broadcast, tensors, opts)
        return self._observe("broadcast", total_bytes(tensors), tensors[0], start)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        start = partial(self.inner.allgather_into_tensor_coalesced, outputs, inputs, opts)
        return self._observe("all_gather", total_bytes(outputs), outputs[0], start)

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        start = partial(self.inner._allgather_base, output, input, opts)
        return self._observe("all_gather", output.nbytes, output, start)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        start = partial(self.inner.reduce_scatter_tensor_coalesced, outputs, inputs, opts)
        return self._observe("reduce_scatter", total_bytes(inputs), inputs[0], start)

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        start = partial(self.inner._reduce_scatter_base, output, input, opts)
        return self._observe("reduce_scatter", input.nbytes, input, start)

    def alltoall_base(self, output: Any, input: Any, *splits: Any) -> Any:
        start = partial(self.inner.alltoall_base, output, input, *splits)
        return self._observe("all_to_all", input.nbytes, input, start)

    def send(self, tensors: list[torch.Tensor], *to: Any) -> Any:
        return self._observe("send", total_bytes(tensors), tensors[0], partial(self.inner.send, tensors, *to))

    def recv(self, tensors: list[torch.Tensor], *source: Any) -> Any:
        return self._observe("recv", total_bytes(tensors), tensors[0], partial(self.inner.recv, tensors, *source))

    # Set-up only.

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self.inner.allgather(outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.inner.barrier(opts)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return NAME

    # What torch calls on a group that it has made: it sets the name on the C++ part, which a Python subclass lacks.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types


class ObservedWork(dist.Work):
    """A collective in flight: every wait for it is recorded, also one from C++."""

    def __init__(self, inner: dist.Work, entry: Entry, clock: torch.device) -> None:
        super().__init__()
        self.inner, self.entry, self.clock = inner, entry, clock

    def wait(self, timeout: Any = None) -> bool:
        if self.entry.wait_started is None:
            self.entry.wait_started = mark(self.clock)
        self.inner.wait()
        self.entry.wait_ended = mark(self.clock)
        return True

    def is_completed(self) -> bool:
        return self.inner.is_completed()

    def get_future(self) -> Any:
        return self.inner.get_future()


def total_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


NAME = "observed"
"""The name under which torch registers the backend."""


def observed_group(group: Group, purpose: str = "activations", sees_waits: bool = True) -> dist.ProcessGroup:
    """A group of the same ranks whose collectives are recorded, for engines that look groups up by name: DTensor's
    meshes, `torch.distributed.pipelining`. Every rank of the group must call it.
    """
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make_observed, extended_api=True, devices=["cpu", "cuda"])
    ranks = dist.get_process_group_ranks(group.native)
    lane = f"{NAME} {group.axis} {purpose} {group.backend}"
    return shared_group(ranks, NAME, lane=lane, options=(group, purpose, sees_waits), description=group.axis)


def _make_observed(_: Any, options: Any) -> ObservedGroup:
    return ObservedGroup(*options)


class GroupOfDDP(ObservedGroup):
    """For DDP, which takes the Python object, waits in C++ where we cannot see it, and asks for gradients' futures."""

    def __init__(self, group: Group, broadcasts: str) -> None:
        """`broadcasts`: the purpose of its broadcasts."""
        super().__init__(group, "gradients", sees_waits=False)
        self.broadcasts, self._open = broadcasts, list[Entry]()

    def _entry(self, ledger: Ledger, operation: str, nbytes: int) -> Entry:
        if operation == "broadcast":
            return ledger.add(operation, self.broadcasts, self.group, nbytes)
        entry = super()._entry(ledger, operation, nbytes)
        entry.subject = f"bucket {len(self._open)}"
        self._open.append(entry)
        return entry

    def waits_until_now(self, device: torch.device) -> None:
        """Fill in the wait times of a backward pass that has just returned.

        DDP issues each collective as soon as its bucket is ready, and waits for all of them at the end of backward:
        after the last one is issued there is nothing left to compute, and the rest of backward is exposed.
        """
        ends = [entry.ended for entry in self._open if isinstance(entry.ended, float)]
        seen = ends and len(ends) == len(self._open)
        over = max(ends) if seen else mark(device)
        for entry in self._open:
            entry.wait_started, entry.wait_ended = self._open[-1].issued, over
        self._open = []

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
    """Make these methods of `target` record themselves in the ledger; a second call does nothing."""
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
