"""Signals that ask a run to stop."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.launch.start import CTRL_C_PASSED_ON, TO_STOP
from lockstep.strategies import ParallelModel

NAMES: dict[int, str] = {
    **{number: number.name for number in TO_STOP},
    signal.SIGINT: "Ctrl-C",
    CTRL_C_PASSED_ON: "Ctrl-C",
}


@contextmanager
def stopping_in_good_order(strategy: ParallelModel, received: list[str]) -> Iterator[None]:
    """SIGTERM, SIGUSR1 or Ctrl-C: the step is finished, all ranks agree to stop, and save. A second Ctrl-C ends it.

    `received`: gets the names of the signals that come to this rank.
    """

    def stop(number: int) -> None:
        if number == signal.SIGINT and "Ctrl-C" in received:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        received.append(NAMES[number])
        strategy.request_stop()

    if received:  # before there was a strategy to stop
        strategy.request_stop()
    with calling(stop):
        yield


@contextmanager
def noting(received: list[str]) -> Iterator[None]:
    """Where nothing runs yet that could be stopped, or nothing any more: the next run hears of it when it begins."""
    with calling(lambda number: received.append(NAMES[number])):
        yield


@contextmanager
def calling(react: Callable[[int], None]) -> Iterator[None]:
    """At each signal that asks to stop. Signals come to the main thread only; in another one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda number, _: react(number)) for number in NAMES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
