"""An exercise may do anything. What keeps it in its place, on its rank: its time, its way out, what is said below."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lockstep.errors import UserError
from lockstep.learn.recorder import line_in

IDLE = 2
"""How many times longer it may take by the clock than it may compute: waiting has a limit of its own."""


class CutShort(BaseException):
    """No Exception: an exercise that catches those is left all the same."""


@contextmanager
def cut_short(file: Path, seconds: float) -> Iterator[None]:
    """An exercise that computes for longer than this is left, wherever it is."""

    def leave(number: int, frame: FrameType | None) -> None:
        limit = seconds if number == signal.SIGVTALRM else IDLE * seconds
        line = line_in(str(file), frame)
        place = "the exercise" if line is None else f"{file.name} line {line}"
        raise CutShort(f"it did not end within {limit:g} s: it is at {place}")

    signals = {signal.SIGVTALRM: (signal.ITIMER_VIRTUAL, seconds), signal.SIGALRM: (signal.ITIMER_REAL, IDLE * seconds)}
    before = {number: signal.signal(number, leave) for number in signals}
    for timer, limit in signals.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, (timer, _) in signals.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


@contextmanager
def not_leaving(file: Path, where: str) -> Iterator[None]:
    """An exercise that calls os._exit would be gone without a word, and the agent would wait for what it brings."""
    process, leave = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        line = line_in(str(file), sys._getframe())
        if os.getpid() == process and line is not None:
            get_error_handler().record_exception(UserError(f"{where}os._exit({status}) at {file.name} line {line}"))
            status = status or 1
        leave(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


# ---- what gloo and NCCL say of themselves ------------------------------------------------------------------------


@contextmanager
def quiet_below(folder: Path, rank: int) -> Iterator[None]:
    """Stacks of C++ threads go to a file; what Python writes still goes to the screen."""
    sys.stderr.flush()
    screen = os.dup(2)
    with (folder / f"rank{rank}.below").open("wb") as kept:
        os.dup2(kept.fileno(), 2)
    before, sys.stderr = sys.stderr, os.fdopen(screen, "w", buffering=1, errors="replace")
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(screen, 2)
        sys.stderr = before


def said_below(folder: Path) -> str:
    return "\n".join(file.read_text(errors="replace") for file in sorted(folder.glob("rank*.below")))
