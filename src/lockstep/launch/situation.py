"""What the ranks were doing when they hung, and who is to blame for it: one line first, then every rank's own."""

import json
import os
import platform
import sys
import threading
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lockstep.launch.calls import Call, last_calls
from lockstep.launch.processes import process_namespace
from lockstep.words import listed

FRAMES = 6
FINISHED = "its work is done"
"""What became of a rank that has returned."""
BENEATH = ("/lockstep/comm/", "/torch/", "/threading.py", "/contextlib.py", "<frozen ")


@dataclass
class Situation:
    """Of one rank, by itself."""

    rank: int
    host: str
    pid: int
    calls: list[Call] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    """Of the main thread, innermost last: file:line function."""

    def to_json(self) -> str:
        """A group of N ranks takes as much room as one of two: N ranks answer one that reads for all."""
        calls = [{**asdict(replace(call, ranks=())), "ranks": packed(call.ranks)} for call in self.calls]
        return json.dumps({**asdict(replace(self, calls=[])), "calls": calls})

    @classmethod
    def from_json(cls, text: str) -> "Situation":
        values = json.loads(text)
        calls = [Call(**{**call, "ranks": unpacked(tuple(call["ranks"]))}) for call in values.pop("calls")]
        return cls(**values, calls=calls)

    @property
    def pending(self) -> list[Call]:
        return [call for call in self.calls if not call.over]

    def last_in(self, group: str, ranks: tuple[int, ...]) -> Call | None:
        return next((c for c in self.calls if (c.group, c.ranks) == (group, ranks) and c.number), None)


def packed(ranks: tuple[int, ...]) -> list[int | str]:
    """Equally spaced numbers as their first, their last and the step; else all of them."""
    step = ranks[1] - ranks[0] if len(ranks) > 3 else 0
    if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return ["range", ranks[0], ranks[-1] + 1, step]
    return list(ranks)


@lru_cache(1024)
def unpacked(ranks: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(range(*ranks[1:])) if ranks[:1] == ("range",) else ranks


def local_situation(rank: int) -> Situation:
    """Of this process, as it is now; asked from another thread than its main one."""
    return Situation(rank, platform.node(), os.getpid(), last_calls(), main_stack())


def main_stack() -> list[str]:
    """The innermost frames that are not about how a collective waits."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [] if frame is None else traceback.extract_stack(frame)
    relevant = [f for f in frames if not is_beneath(f.filename)]
    return [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in relevant[-FRAMES:]]


def main_position() -> tuple[int, int] | None:
    """Of the main thread: the innermost frame that is not about how a collective waits, and its instruction."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and is_beneath(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (id(frame), frame.f_lasti)


def is_beneath(file: str) -> bool:
    return any(part in file for part in BENEATH)


# ---- who is to blame -------------------------------------------------------------------------------------------


def verdict(found: dict[int, Situation], silent: dict[int, str]) -> str:
    """One line. `silent`: ranks that did not answer, and what became of their processes."""
    finished = [rank for rank, state in silent.items() if state == FINISHED]
    if lost := {rank: state for rank, state in silent.items() if state != FINISHED}:
        return f"{_ranks(lost)} did not answer: {'; '.join(lost.values())}" + _who_waits(found, set(lost))
    if finished and (waits := _who_waits(found, set(finished))):
        have = "has" if len(finished) == 1 else "have"
        return f"{_ranks(finished)} {have} finished{waits}: ranks must make the same calls in the same order"
    for call in _open(found):
        if call.number:
            line = _in_step(call, found)
            if line is not None:
                return line
    for rank, situation in sorted(found.items()):
        for call in situation.pending:
            if call.waits_for in found and not found[call.waits_for].pending:
                return f"rank {call.waits_for} did not reach what rank {rank} waits for: {call.words}" + _where(
                    found[call.waits_for]
                )
    waiting = sorted(rank for rank, situation in found.items() if situation.pending)
    if waiting:
        return (
            f"{_ranks(waiting)} {'wait' if len(waiting) > 1 else 'waits'} though every rank came: what they send does "
            f"not arrive, or they wait for each other in a circle (lockstep doctor tries the connections)"
        )
    return "no rank waits for another one now"


def _in_step(call: Call, found: dict[int, Situation]) -> str | None:
    """What is wrong with a collective that does not end: a rank issued another in its place, or none."""
    theirs = {r: found[r].last_in(call.group, call.ranks) for r in call.ranks if r in found}
    behind = sorted(r for r, last in theirs.items() if last is None or last.number < call.number)
    same = {r: last.what for r, last in theirs.items() if last is not None and last.number == call.number}
    if len(set(same.values())) > 1:
        most = Counter(same.values()).most_common(1)[0][0]
        odd = sorted(r for r, what in same.items() if what != most)
        rest = sorted(set(same) - set(odd))
        return (
            f"{_ranks(odd)} called {same[odd[0]]}, and {_ranks(rest)} {most}, as call {call.number} of {call.group}: "
            f"ranks must make the same calls in the same order"
        )
    if behind:
        return f"{_ranks(behind)} did not reach {call.words}" + _where(found[behind[0]])
    return None


def _open(found: dict[int, Situation]) -> list[Call]:
    """Calls that do not end; the one that most ranks wait in first."""
    calls = [call for situation in found.values() for call in situation.pending]
    return [call for call, _ in Counter(calls).most_common()]


def _where(situation: Situation) -> str:
    pending = situation.pending
    if pending:
        return f"; it waits in {pending[0].words}"
    return f"; it is at {situation.stack[-1]}" if situation.stack else ""


def _who_waits(found: dict[int, Situation], silent: set[int]) -> str:
    for rank, situation in sorted(found.items()):
        for call in situation.pending:
            if silent & {*call.ranks, call.waits_for}:
                return f"; rank {rank} waits in {call.words}"
    return ""


def _ranks(ranks: "dict[int, str] | list[int]") -> str:
    return f"rank{'s' * (len(ranks) != 1)} {listed(sorted(ranks))}"


def report(found: dict[int, Situation], silent: dict[int, str]) -> str:
    """The verdict, and beneath it what every rank was doing."""
    lines = [verdict(found, silent)]
    for rank in sorted({*found, *silent}):
        if rank in silent:
            lines.append(f"  rank {rank}: {silent[rank] if silent[rank] == FINISHED else f'no answer; {silent[rank]}'}")
            continue
        situation = found[rank]
        doing = "; ".join(
            f"in {call.words}" + (f", waiting for rank {call.waits_for}" if call.waits_for is not None else "")
            for call in situation.pending
        )
        lines.append(f"  rank {rank} (process {situation.pid} on {situation.host}): {doing or 'in no collective'}")
        lines += [f"      {frame}" for frame in situation.stack]
    return "\n".join(lines)


def state_of(host: str, pid: int, namespace: int | None = None) -> str:
    """What the system says of another rank's process, where it is on this machine, and in this container."""
    if host != platform.node() or namespace not in (None, process_namespace()):
        return f"process {pid} on {host}"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return f"process {pid} on {host} is gone"
    known = {"T": "is stopped (SIGSTOP; kill -CONT lets it go on)", "t": "is stopped by a debugger", "Z": "has ended"}
    known["D"] = "waits for the disk or a device (state D)"
    return f"process {pid} on {host} {known.get(state, f'is there (state {state}), and does not react')}"
