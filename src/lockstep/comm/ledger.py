"""The ledger: every collective of a step, with its bytes and when it was issued, waited for and done.

It gives the bytes that `verify` compares with theory, and the exposed communication: the time in which the step was
stalled by waits. On the CPU time is the host's clock; on a GPU the marks are events on the streams (issue
and wait on the compute stream), so the stream's wait is measured without making the host wait too.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lockstep.intervals import covered
from lockstep.layout.group import Group

Mark = float | torch.cuda.Event
"""A moment: seconds of the host's clock, or an event on a CUDA stream."""


def mark(device: torch.device) -> Mark:
    """Now, on the clock of `device`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return start.elapsed_time(end) / 1000


def wire_factor(operation: str, group_size: int) -> float:
    """Bytes that each rank sends per byte of payload, with a bandwidth-optimal algorithm.

    Payload is nccl-tests' S: the size of the whole array, also for all_gather.
    """
    n = group_size
    share = (n - 1) / n
    alone = 0.0 if n == 1 else 1.0
    return {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share,
        "scatter": share,
        "gather": share,
        "broadcast": alone,
        "reduce": alone,
        "send": alone,
        "recv": 0.0,
        "barrier": 0.0,
    }[operation]


@dataclass
class Entry:
    """One collective, as one rank saw it."""

    operation: str
    purpose: str
    """What it carried: gradients, parameters, buffers; or bookkeeping: count, loss, flags."""
    axis: str
    """Along which axes of the layout the group lies: "shard", "replicate x shard"."""
    group_size: int
    nbytes: float
    """Payload S in bytes; of an uneven all-to-all, that of an even one that sends as much."""
    issued: Mark
    subject: str = ""
    """The bucket or block that it carries."""
    wait_started: Mark | None = None
    wait_ended: Mark | None = None
    awaited_later: bool = False
    """It is still in flight when its step ends. The time that a step waits for it counts in the next step, which waits.
    """
    ended: Mark | None = None
    """When the last byte had arrived, where that can be seen; never later than `wait_ended`."""

    @property
    def over(self) -> Mark | None:
        """The first sign that it was done: from the transport, or from the end of the wait for it."""
        if isinstance(self.ended, float) and isinstance(self.wait_ended, float):
            return min(self.ended, self.wait_ended)
        return self.ended or self.wait_ended

    @property
    def waited_until(self) -> Mark | None:
        """On a GPU an engine's wait may include the copies that follow (FSDP2's): end it when the collective ended."""
        if isinstance(self.ended, torch.cuda.Event) and isinstance(self.wait_ended, torch.cuda.Event):
            self.wait_ended.synchronize()
            return self.ended if self.ended.elapsed_time(self.wait_ended) > 0 else self.wait_ended
        return self.wait_ended

    @property
    def cut(self) -> str:
        """The model axis that it belongs to, "optimizer", or "data": gradients are reduced over the ranks of cp too."""
        if self.purpose == "matrices":
            return "optimizer"
        return self.axis if self.purpose == "activations" or self.axis in ("pp", "tp", "ep") else "data"

    @property
    def wire_bytes(self) -> float:
        return wire_factor(self.operation, self.group_size) * self.nbytes


MODEL_PURPOSES = ("gradients", "parameters", "flags", "buffers", "activations", "matrices")
"""Traffic that grows with the model or with the batch."""

STEP_PURPOSES = (*MODEL_PURPOSES, "agreement", "norm", "count")
"""What a step waits for. The loss is reduced too, but only a caller that reads it waits."""


@dataclass
class Traffic:
    """What one rank sent for the model in one step.

    The step's own few bytes are left out: the counts (24), the loss (16), an agreement (4: local SGD whether to step,
    DataParallel on GPUs whether a gradient came late), and the norm of sharded gradients (4 or 8).
    """

    collectives: int
    wire_bytes: float
    parameter_bytes: float = 0.0
    """The part of it that carries parameters."""
    axis_bytes: dict[str, float] = field(default_factory=dict)
    """The parts of it along axes that cut the model: tp, cp, pp."""


@dataclass
class Ledger:
    """The collectives of one step, in the order in which they were issued."""

    device: torch.device = torch.device("cpu")
    entries: list[Entry] = field(default_factory=list)
    carried: list[Entry] = field(default_factory=list)
    """Still in flight when this step began: they count here as time, and as traffic in the step that issued them."""
    started: Mark | None = None
    sees_ends: bool = False
    """On a GPU: also record when collectives of engines that we did not write end. For all others it always is."""

    def open(self) -> None:
        """Begin a new step."""
        self.carried = [e for e in self.entries if e.awaited_later and e.wait_ended is None]
        self.entries = []
        self.started = mark(self.device)

    def add(self, operation: str, purpose: str, group: Group, nbytes: float) -> Entry:
        entry = Entry(operation, purpose, group.axis, group.size, nbytes, mark(self.device), _subject)
        entry.wait_started = entry.issued if _standing_still else None
        entry.awaited_later = _awaited_later
        self.entries.append(entry)
        return entry

    def of(self, *purposes: str) -> list[Entry]:
        return [e for e in self.entries if e.purpose in purposes]

    def traffic(self, axis: str = "") -> Traffic:
        """Along one of the model's axes, or the data axes ("data"); along all if none is named. A receive counts as
        not sent.
        """
        entries = [e for e in self.of(*MODEL_PURPOSES) if e.operation != "recv"]
        if axis:
            entries = [e for e in entries if e.cut == axis]
        parameters = sum(e.wire_bytes for e in entries if e.purpose == "parameters")
        by_axis: dict[str, float] = {}
        for entry in entries:
            if entry.cut != "data":
                by_axis[entry.cut] = by_axis.get(entry.cut, 0.0) + entry.wire_bytes
        return Traffic(len(entries), sum(e.wire_bytes for e in entries), parameters, by_axis)

    def exposed_seconds(self, *purposes: str, within: tuple[Mark, Mark] | None = None) -> float:
        """Time in which the step was stalled by waits (for these purposes, or any); overlapping waits count once."""
        waits = [(e.wait_started, e.waited_until) for e in self._timed(*(purposes or STEP_PURPOSES))]
        return self._union(waits, within)

    def _timed(self, *purposes: str) -> list[Entry]:
        """Entries whose time counts here: those left in flight by the step before, not those that this step leaves."""
        own = [e for e in self.entries if not e.awaited_later]
        return [e for e in [*self.carried, *own] if e.purpose in purposes]

    def busy_seconds(self) -> float | None:
        """Time in which some communication was in flight. None: the end of some was not observed.

        The step's own few bytes count only while it waits for them: 16 bytes that no step waits for overlap nothing.
        """
        model = self._timed(*MODEL_PURPOSES)
        if any(entry.over is None for entry in model):
            return None
        waits = [(e.wait_started, e.waited_until) for e in self._timed(*STEP_PURPOSES)]
        flights = [(self.started if e in self.carried else e.issued, e.over) for e in model]
        return self._union([*flights, *waits])

    def _union(
        self, intervals: Iterable[tuple[Mark | None, Mark | None]], within: tuple[Mark, Mark] | None = None
    ) -> float:
        started = self.started
        assert started is not None, "open() begins a step"
        spans = [
            (seconds_between(started, a), seconds_between(started, b)) for a, b in intervals if a is not None and b
        ]
        return covered(spans, *(seconds_between(started, moment) for moment in within or ()))


_active: Ledger | None = None
_subject = ""
_standing_still = False
_awaited_later = False


def active_ledger() -> Ledger | None:
    """The ledger that collectives write to now, if any."""
    return _active


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Collectives issued inside are recorded with this bucket or block as their subject."""
    global _subject
    before, _subject = _subject, subject
    try:
        yield
    finally:
        _subject = before


@contextmanager
def standing_still() -> Iterator[None]:
    """Nothing is left to compute: the wait for what is issued inside starts when it is issued, not at `wait`."""
    global _standing_still
    before, _standing_still = _standing_still, True
    try:
        yield
    finally:
        _standing_still = before


@contextmanager
def awaited_later(so: bool = True) -> Iterator[None]:
    """What is issued inside is waited for in the next step."""
    global _awaited_later
    before, _awaited_later = _awaited_later, so
    try:
        yield
    finally:
        _awaited_later = before


@contextmanager
def recording(ledger: Ledger) -> Iterator[Ledger]:
    """Collectives issued inside, from any thread, are written to `ledger`."""
    global _active
    before, _active = _active, ledger
    try:
        yield ledger
    finally:
        _active = before
