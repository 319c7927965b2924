"""A command in a process of its own, and what it says, line by line, with the time of each."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

LIMIT = 120.0
"""Seconds that a round may take in all."""


class Command:
    """A `lockstep train` that faults are planted in."""

    def __init__(self, words: list[str], **environment: str) -> None:
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait(self, seconds: float) -> int | None:
        """The exit status; None: it took longer, and was ended."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            status = None
            self.process.wait()
        self._reader.join(5)
        return status

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def said(self, pattern: str) -> float | None:
        """When it first said something like that."""
        return next((at for at, line in self.lines if pattern and re.search(pattern, line)), None)


def until(what: str, ready: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.002)
    return found
