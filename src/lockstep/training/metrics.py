"""What a run reports: one record per logged step, to metrics.jsonl, to TensorBoard and to the progress bar."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.errors import UserError


class MetricsWriter:
    """Appends records to `folder/metrics.jsonl` and TensorBoard event files. A None folder writes nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._file = folder, None
        self._board: Any = None
        if folder is not None:
            with writing_to(folder):
                self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
                from torch.utils.tensorboard import SummaryWriter  # slow to import, and rank 0's alone

                self._board = SummaryWriter(str(folder))

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """A disk that fills up in the middle of a run costs the records, not the run."""
        if self._folder is None:
            return
        try:
            self._write(kind, step, values)
        except OSError as error:
            print(f"{self._folder}: metrics end at step {step} ({error.strerror}); training goes on", file=sys.stderr)
            self._folder = None

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        assert self._file is not None
        assert self._board is not None
        finite = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")  # JSON knows no NaN
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._folder is not None and self._file is not None and self._board is not None:
            with writing_to(self._folder):
                self._file.close()
                self._board.close()


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """A full disk, a missing right or a file in the way is the user's to mend: one line, not a traceback."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--run-dir {folder} cannot be written ({error.strerror}); choose another folder") from None
