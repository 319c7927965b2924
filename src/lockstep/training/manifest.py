"""What makes a folder a whole checkpoint: a list of its files with their sizes and checksums, written last."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
BLOCK = 4 * 1024 * 1024


class DamagedError(Exception):
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
    """Raise DamagedError unless every file of the manifest is there, byte for byte."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except OSError as error:
        raise DamagedError(f"{folder / MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise DamagedError(f"{folder / MANIFEST} is damaged") from None
    for name, expected in listed.items():
        file = folder / name
        try:
            size = file.stat().st_size
            if size != expected["bytes"]:
                raise DamagedError(f"{file} has {size:,} bytes instead of {expected['bytes']:,}")
            if checksum(file) != expected["sha256"]:
                raise DamagedError(f"{file} has been changed: its checksum differs")
        except OSError as error:
            raise DamagedError(f"{file} cannot be read ({error.strerror})") from None


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
