"""Files and folders that are there whole or not at all."""

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


def write_whole(file: Path, text: str) -> None:
    """In place of an old file only when the new one is whole. A device or a pipe is written to as it is."""
    target = file.resolve() if file.is_symlink() else file
    part = target.with_name(f".{target.name}.part-{os.getpid()}")
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8", newline="")
            return
        part.write_text(text, encoding="utf-8", newline="")
        part.replace(target)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); choose another place") from None
    finally:
        part.unlink(missing_ok=True)
