"""A named piece of memory in /dev/shm that several processes map, and that never outlives them.

The name exists only until all ranks have opened it; after that the kernel frees the memory when the last process ends,
for whatever reason. A process killed before that leaves the name behind: it contains the owner's process, and the next
start removes names whose owner is gone (`remove_leftovers`).
"""

import mmap
import os
import uuid
import weakref
from pathlib import Path

from lockstep.errors import UserError
from lockstep.launch.processes import has_ended, signature

FOLDER = Path("/dev/shm")
PREFIX = "lockstep-"


def remove_leftovers() -> list[str]:
    """Remove names whose owner, a process of this namespace, is gone. Returns what was removed."""
    removed = []
    for path in FOLDER.glob(f"{PREFIX}*"):
        if has_ended(path.name.removeprefix(PREFIX)):
            try:
                path.unlink()
            except OSError:  # another process was faster; it is another user's; it is a launcher's folder, not ours
                continue
            removed.append(path.name)
    return removed


class Segment:
    """`nbytes` of zeros, shared by all who open the same name."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name, self.memory = name, memory

    @classmethod
    def create(cls, nbytes: int) -> "Segment":
        remove_leftovers()
        name = f"{PREFIX}{signature()}-{uuid.uuid4().hex[:12]}"
        descriptor = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # now, not as a SIGBUS at the first touch
            segment = cls(name, mmap.mmap(descriptor, nbytes))
            weakref.finalize(segment, _unlink, name)  # should the others never come
            return segment
        except OSError as error:
            _unlink(name)
            free = os.statvfs(FOLDER).f_bavail * os.statvfs(FOLDER).f_frsize
            raise UserError(
                f"shared memory: {nbytes / 2**20:.0f} MiB were asked for and {FOLDER} has {free / 2**20:.0f} MiB free "
                f"({error.strerror}); enlarge it (docker run --shm-size=1g) or use --backend gloo"
            ) from None
        finally:
            os.close(descriptor)

    @classmethod
    def private(cls, nbytes: int) -> "Segment":
        """For a rank that is alone: no name, no other process."""
        return cls("", mmap.mmap(-1, nbytes))

    @classmethod
    def open(cls, name: str) -> "Segment":
        descriptor = os.open(FOLDER / name, os.O_RDWR)
        try:
            return cls(name, mmap.mmap(descriptor, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)

    def is_named(self) -> bool:
        return (FOLDER / self.name).exists()

    def forget_name(self) -> None:
        """All ranks have it open: from here on it lives exactly as long as its processes."""
        _unlink(self.name)


def _unlink(name: str) -> None:
    (FOLDER / name).unlink(missing_ok=True)
