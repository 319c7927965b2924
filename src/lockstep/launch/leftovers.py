"""What launchers that were killed have left behind, removed at the next start.

A launcher's temporary folder carries the launcher's signature in its name, and a note of each rank with the names of
the semaphores that Python's multiprocessing has made for it: when all of it is killed, nothing removes those.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

from lockstep.launch.processes import has_ended, signature

FOLDER_PREFIX = "lockstep-"
SEMAPHORES = "semaphores-"
SHARED_MEMORY = Path("/dev/shm")
SEMAPHORE = re.compile(r"sem\.mp-\w+")


MEMORY = "LOCKSTEP_MEMORY"
"""How our launcher passes that place to its ranks."""


def in_memory() -> Path:
    """A folder of the whole machine that no disk stands behind, where there is one."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def memory_of(process: str) -> Path:
    """Where a launch keeps what outlives its ranks and not itself; the first writer makes it."""
    return in_memory() / f"{FOLDER_PREFIX}{process}"


def memory_home() -> Path | None:
    """Of the launch that this rank belongs to: ours, or torchrun's agent. None: no launcher would restart it."""
    ours = os.environ.get(MEMORY)
    if ours is not None:
        return Path(ours) if ours else None
    return memory_of(signature(os.getppid())) if "TORCHELASTIC_RUN_ID" in os.environ else None


def note_semaphores(folder: str) -> None:
    """Write down the named semaphores that this process has open, for the process that cleans up after a kill."""
    maps = Path("/proc/self/maps")
    found = sorted(set(SEMAPHORE.findall(maps.read_text()))) if maps.exists() else []
    try:
        Path(folder, f"{SEMAPHORES}{os.getpid()}").write_text("\n".join(found))
    except FileNotFoundError:  # the launcher has ended meanwhile
        return


def remove_leftovers() -> None:
    """Of launchers of this process namespace that are gone."""
    for folder in [f for home in (Path(tempfile.gettempdir()), in_memory()) for f in home.glob(f"{FOLDER_PREFIX}*")]:
        try:
            if (
                folder.is_dir()
                and has_ended(folder.name.removeprefix(FOLDER_PREFIX))
                and folder.stat().st_uid == os.getuid()
            ):
                for note in folder.glob(f"{SEMAPHORES}*"):
                    for name in SEMAPHORE.findall(note.read_text()):
                        (SHARED_MEMORY / name).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # another start was quicker
            continue
