"""A folder that is there whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import UserError


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A new folder, whole or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already; remove it, or choose another --out")
    part = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        yield part
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror or error}); choose another --out") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
