"""What a run leaves for its successor: the next attempt of the same launch, or a person who asks how it is.

status.json   the launch, its state, the ranks' processes, and in which steps earlier attempts ended
.step         the step in progress: mapped memory, which the system keeps when the process is killed
"""

import json
import mmap
import os
import platform
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from lockstep.comm.collectives import all_gather_objects
from lockstep.errors import UserError
from lockstep.launch.regroup import Regroup
from lockstep.launch.watch import store_address
from lockstep.layout.world import World
from lockstep.results.whole import write_whole
from lockstep.strange import json_of

STATUS, STEP = "status.json", ".step"
NUMBER = struct.Struct("<q")


@dataclass
class Status:
    """Of a run, by its folder."""

    launch: str | None
    state: Literal["running", "stopped", "done", "failed"]
    restarts: int
    ranks: list[tuple[str, int]]
    """Machine and process of each rank."""
    store: str = ""
    """The address of the ranks' store, which answers what they are doing; nothing for a single rank."""
    ended_in: list[int] = field(default_factory=list)
    """The steps that were in progress when the ranks of earlier attempts ended."""


def read_status(run: Path) -> Status | None:
    """None: the folder has none, or none of ours."""
    try:
        status = Status(**json_of(run / STATUS))
        status.ranks = [(str(host), int(pid)) for host, pid in status.ranks]
        status.ended_in = [int(step) for step in status.ended_in]
    except (OSError, ValueError, TypeError):
        return None
    return status if status.ranks else None


def note_if_gone(run: Path) -> None:
    """A run that says it runs, whose processes were of this machine and are all gone, has failed: they were killed, and
    could not say so.
    """
    status = read_status(run)
    if status is None or status.state != "running":
        return
    if all(host == platform.node() and not psutil.pid_exists(pid) for host, pid in status.ranks):
        status.state = "failed"
        with suppress(OSError):  # a folder that cannot be written says what it said
            write_status(run, status)


def write_status(run: Path, status: Status) -> None:
    write_whole(run / STATUS, json.dumps(asdict(status), indent=1) + "\n")


def step_in_progress(run: Path) -> int:
    """0: it took none."""
    try:
        found = (run / STEP).read_bytes()
    except OSError:
        return 0
    return int(NUMBER.unpack(found)[0]) if len(found) == NUMBER.size else 0


def all_ends(run: Path, status: Status) -> list[int]:
    """In which steps the attempts have ended, the last one's too."""
    return [*status.ended_in, step_in_progress(run)]


class Attempt:
    """Keeps `status.json` and `.step` up to date, on the first rank; on others it does nothing."""

    def __init__(self, world: World, folder: Path | None, ended_in: list[int]) -> None:
        """All ranks together."""
        ranks = all_gather_objects((platform.node(), os.getpid()))
        self._folder = folder if world.is_main else None
        store = store_address() if world.size > 1 else ""
        self.status = Status(world.launch, "running", world.restarts, ranks, store, ended_in)
        self._step: mmap.mmap | None = None

    def take(self, step: int) -> None:
        """This step begins."""
        if self._step is not None:
            NUMBER.pack_into(self._step, 0, step)

    def end(self, state: Literal["stopped", "done", "failed"]) -> None:
        """A disk that has become full costs the note, not what was trained."""
        self.status.state = state
        try:
            self._write()
        except UserError as error:
            print(error, file=sys.stderr)

    def _write(self) -> None:
        if self._folder is not None:
            write_status(self._folder, self.status)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """From here on the folder says that it runs."""
        if self._folder is None:
            yield
            return
        self._write()
        with (self._folder / STEP).open("w+b") as file:
            file.write(NUMBER.pack(0))
            file.flush()
            with mmap.mmap(file.fileno(), NUMBER.size) as self._step:
                try:
                    yield
                except Regroup:
                    raise  # it goes on
                except BaseException:
                    self.end("failed")
                    raise
                finally:
                    self._step = None
