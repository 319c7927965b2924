"""What watches over the ranks of a check from outside, for exercises that nothing inside of them can end.

    rank0.pid       its process, the first of a group of its own: whatever an exercise starts is in it
    rank0.graded    what it brings back; it is there when the rank is done, whatever it waits for afterwards
    rank0.stack     where it was when its time was over

A rank that is not done in time, or does not end when it is done, is ended with its group.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from lockstep.learn.rank import Graded, Guess
from lockstep.results.whole import write_whole

LOOK_EVERY = 0.1
GRACE = 2.0
"""Seconds that ranks which are done have to end, and that a rank which is cut short from inside has to say so."""


class Overseer(threading.Thread):
    """Of the ranks of one check, in the process that has started them."""

    def __init__(self, folder: Path, size: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self.folder, self.size, self.seconds = folder, size, seconds
        self.cut = False
        """Whether the time was over."""
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set() and len(self._groups()) < self.size:
            self._over.wait(LOOK_EVERY)  # starting ranks takes what it takes; the exercise's time is what counts
        end = time.monotonic() + self.seconds + GRACE
        while not self._over.is_set() and self.graded() is None and time.monotonic() < end:
            self._over.wait(LOOK_EVERY)
        self.cut = not self._over.is_set() and self.graded() is None
        if not self.cut:
            self._over.wait(GRACE)
        self._end_ranks()

    def stop(self) -> None:
        """The ranks have ended; what they have started has not, perhaps."""
        self._over.set()
        self.join()

    def graded(self) -> list[Graded] | None:
        """Of every rank; None: not all are done."""
        found = []
        for rank in range(self.size):
            try:
                values = json.loads((self.folder / f"rank{rank}.graded").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return None
            found.append(Graded(values["problem"], [Guess(**guess) for guess in values["guesses"]], values["notes"]))
        return found

    def places(self, file: Path) -> list[str]:
        """Where in the exercise each rank was when its time was over."""
        found = []
        for stack in sorted(self.folder.glob("rank*.stack")):
            place = re.search(rf'File "{re.escape(str(file))}", line (\d+) in (\w+|<module>)', stack.read_text())
            if place is not None:
                found.append(f"{stack.stem.replace('rank', 'rank ')}: {file.name} line {place[1]}, in {place[2]}")
        return found

    def _groups(self) -> list[int]:
        texts = [f.read_text() for f in self.folder.glob("rank*.pid")]
        return [int(text) for text in texts if text.isdecimal()]

    def _end_ranks(self) -> None:
        for group in self._groups():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


# ---- on a rank ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def overseen(folder: Path, rank: int, seconds: float) -> Iterator[None]:
    """A rank of a check: its process is known, and where it is when its time is over will be."""
    os.setpgid(0, 0)
    write_whole(folder / f"rank{rank}.pid", str(os.getpid()))
    with (folder / f"rank{rank}.stack").open("w") as stack:
        faulthandler.dump_traceback_later(seconds, file=stack)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def bring_back(folder: Path, rank: int, graded: Graded) -> None:
    write_whole(folder / f"rank{rank}.graded", json.dumps(asdict(graded)))
