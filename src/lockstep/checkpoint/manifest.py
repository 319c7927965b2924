"""What makes a folder a whole checkpoint: a list of its files with their sizes and checksums, written last."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.strange import json_of

MANIFEST = "manifest.json"
METADATA = ".metadata"
"""torch's list of the tensors and where they lie."""
RUN = "run.json"
"""Ours: the step, the number of ranks, what the data's position depends on."""
BLOCK = 4 * 1024 * 1024


class DamagedError(UserError):
    """A checkpoint that must not be loaded; the message names the file."""


def checksum(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def describe(files: list[Path]) -> dict[str, dict[str, Any]]:
    return {f.name: {"bytes": f.stat().st_size, "sha256": checksum(f)} for f in files}


def write_manifest(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    write_durably(folder / MANIFEST, json.dumps({"files": dict(sorted(files.items()))}, indent=1))
    sync_folder(folder)


def check(folder: Path) -> None:
    """Raise DamagedError unless every file of the manifest is there, byte for byte.

    That proves that nothing was lost, not who wrote it.
    """
    files = listed(folder)
    for name in (METADATA, RUN):
        if name not in files:
            raise DamagedError(f"{folder / MANIFEST} does not list {name}: this is not a whole checkpoint")
    for name, (size, digest) in files.items():
        damage = damage_of(folder / name, size, digest)
        if damage is not None:
            raise DamagedError(damage)


def damage_of(file: Path, size: int, digest: str) -> str | None:
    """What is wrong with a file that should have this size and checksum; None: it is whole."""
    try:
        if file.is_symlink() or not file.is_file():
            return f"{file} is missing, or no file"
        found = file.stat().st_size
        if found != size:
            return f"{file} has {found:,} bytes instead of {size:,}"
        if checksum(file) != digest:
            return f"{file} has been changed: its checksum differs"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    return None


def listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> (bytes, checksum), for names of files in the folder only."""
    file = folder / MANIFEST
    files = read_json(file).get("files")
    if not isinstance(files, dict):
        raise DamagedError(f"{file} is damaged: it has no list of files")
    found = {}
    for name, entry in files.items():
        if not is_plain_name(name):
            raise DamagedError(f"{file} lists {name!r}, which is not a file of its folder")
        size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if not isinstance(size, int) or isinstance(size, bool) or not isinstance(digest, str):
            raise DamagedError(f"{file} is damaged: {name} has no size and checksum")
        found[name] = (size, digest)
    return found


def is_plain_name(name: object) -> bool:
    """Of a file in this very folder: nothing that leads elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set("/\\\0") & set(name)


def read_json(file: Path) -> dict[str, Any]:
    """An object; DamagedError for anything else."""
    try:
        values = json_of(file)
    except OSError as error:
        raise DamagedError(f"{file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DamagedError(f"{file} is damaged: it is not valid JSON") from error
    if not isinstance(values, dict):
        raise DamagedError(f"{file} is damaged: it holds no object")
    return values


def read_run(folder: Path) -> dict[str, Any]:
    """What was saved beside the tensors; DamagedError if it is not what we write."""
    run = read_json(folder / RUN)
    for key in ("step", "ranks"):
        value = run.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise DamagedError(f"{folder / RUN} is damaged: {key} is {value!r}")
    return run


def write_durably(file: Path, text: str) -> None:
    """Written to the disk itself, and in place of an old one only when it is whole."""
    temporary = file.with_name(f".{file.name}.new")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Names are on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
