"""A stranger's files: read without blocking, without filling the memory, and without reaching the terminal as
anything but text.
"""

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 64 * 1024 * 1024


def text_of(file: Path, most: int = MOST_BYTES) -> str:
    """Of an ordinary file of a size that can be meant; ValueError for any other (a pipe would be waited for)."""
    if file.exists() and not file.is_file():
        raise ValueError("it is no ordinary file")
    with file.open(encoding="utf-8") as stream:
        text = stream.read(most + 1)
    if len(text) > most:
        raise ValueError(f"it is longer than {most:,} characters")
    return text


def json_of(file: Path) -> Any:
    """What it holds; ValueError where that is no JSON, or nested deeper than anything is meant to be."""
    try:
        return json.loads(text_of(file))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shown(text: str) -> str:
    """With whatever would move the cursor, color the screen or ring a bell written out."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
