"""Signals that ask a run to stop."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.launch.start import CTRL_C_PASSED_ON, TO_STOP
from lockstep.strategies import ParallelModel

NAMES = {**{number: number.name for number in TO_STOP}, signal.SIGINT: "Ctrl-C", CTRL_C_PASSED_ON: "Ctrl-C"}


@contextmanager
def remembering_signals(received: list[str]) -> Iterator[None]:
    """Where no run is there yet, or none any more, that could be stopped: their names are noted for the next."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda n, _: received.append(NAMES[signal.Signals(n)])) for number in NAMES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stopping_in_good_order(strategy: ParallelModel) -> Iterator[list[str]]:
    """SIGTERM, SIGUSR1 or Ctrl-C: the step is finished, all ranks agree to stop, and save. A second Ctrl-C ends it.

    Gives the names of the signals that have come to this rank.
    """
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # signals come to the main thread only
        return

    def remember(number: int, _: object) -> None:
        if number == signal.SIGINT and "Ctrl-C" in received:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        received.append(NAMES[signal.Signals(number)])
        strategy.request_stop()

    before = {number: signal.signal(number, remember) for number in NAMES}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
