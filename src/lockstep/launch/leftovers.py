"""What launchers that were killed have left behind, removed at the next start.

A launcher's temporary folder carries the launcher's signature in its name, and a note of each rank with the names of
the semaphores that Python's multiprocessing has made for it: killed with everything around it, nobody removes those.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

from lockstep.launch.processes import has_ended

FOLDER_PREFIX = "lockstep-"
SEMAPHORES = "semaphores-"
SHARED_MEMORY = Path("/dev/shm")
SEMAPHORE = re.compile(r"sem\.mp-\w+")


def note_semaphores(folder: str) -> None:
    """Write down the named semaphores that this process has open, for whoever comes after a kill."""
    maps = Path("/proc/self/maps")
    found = sorted(set(SEMAPHORE.findall(maps.read_text()))) if maps.exists() else []
    try:
        Path(folder, f"{SEMAPHORES}{os.getpid()}").write_text("\n".join(found))
    except FileNotFoundError:  # the launcher has ended meanwhile
        return


def remove_leftovers() -> None:
    """Of launchers of this process namespace that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        try:
            if has_ended(folder.name.removeprefix(FOLDER_PREFIX)) and folder.stat().st_uid == os.getuid():
                for note in folder.glob(f"{SEMAPHORES}*"):
                    for name in SEMAPHORE.findall(note.read_text()):
                        (SHARED_MEMORY / name).unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # another start was quicker
            continue
