"""When somebody wants the machine back."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.strategies import Strategy


@contextmanager
def stopping_at_sigterm(strategy: Strategy) -> Iterator[None]:
    """A machine that is wanted back sends SIGTERM: the step is finished, all ranks agree to stop, and save."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread only
        return

    def remember(*_: Any) -> None:
        strategy.stop_requested = True

    before = signal.signal(signal.SIGTERM, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
