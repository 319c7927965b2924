"""Text as bytes: any files, by default the sources of Python's standard library, so it works offline."""

import sysconfig
from pathlib import Path

import numpy as np
import torch

from lockstep.data.dataset import DataSet, DataSpec, Windows
from lockstep.errors import UserError

VOCABULARY = 256
TEST_SHARE = 0.1


def load_text(path: Path | None, context: int, max_bytes: int) -> DataSet:
    """All files at `path` (a file, or a folder read recursively), in the order of their names."""
    if path is None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    elif path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file())
    elif path.is_file():
        files = [path]
    else:
        raise UserError(f"data.path {path} does not exist; give a text file or a folder of them")
    stream = torch.from_numpy(np.frombuffer(_read(files, max_bytes), dtype=np.uint8).copy())
    cut = int(len(stream) * (1 - TEST_SHARE))
    train, test = Windows(stream[:cut], context), Windows(stream[cut:], context)
    if min(len(train), len(test)) == 0:
        needed = int((context + 1) / TEST_SHARE) + 1
        raise UserError(
            f"{path or 'text'} holds {len(stream):,} bytes, but model.context {context} needs at least {needed:,}"
        )
    return DataSet("text", DataSpec("tokens", (context,), VOCABULARY), train, test)


def _read(files: list[Path], max_bytes: int) -> bytearray:
    content = bytearray()
    for file in files:
        if len(content) >= max_bytes:
            break
        try:
            content += file.read_bytes()
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror})") from None
    return content[:max_bytes]
