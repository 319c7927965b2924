"""What a run reports: one record per logged step, to metrics.jsonl, and to whatever else was asked for (`sinks.py`).

No step stands there twice: a run that goes on from step 120 takes the records of later steps away, into a file of their
own, because it will take those steps again.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOENT
from functools import partial
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.results.metrics import METRICS, step_of
from lockstep.results.whole import write_whole
from lockstep.training.sinks import Sink, sinks

SET_ASIDE = "metrics.superseded.jsonl"


def set_aside(folder: Path, after: int) -> bool:
    """Move records of steps beyond `after`, and what is no record, out of the metrics. Whether there were any."""
    file = folder / METRICS
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if file.exists() else []
    kept = [line for line in lines if (step := step_of(line)) is not None and step <= after]
    if len(kept) == len(lines):
        return False
    with (folder / SET_ASIDE).open("a", encoding="utf-8") as aside:
        aside.writelines(line if line.endswith("\n") else f"{line}\n" for line in lines if line not in set(kept))
    write_whole(file, "".join(kept))
    return True


class MetricsWriter:
    """Appends records to `folder/metrics.jsonl`, and hands them to the sinks. A None folder writes nothing."""

    def __init__(self, folder: Path | None, after: int = 0, config: Config | None = None, restarts: int = 0) -> None:
        """`after`: the step that the run goes on from."""
        self._folder, self._file = folder, None
        self._sinks: list[Sink] = []
        if folder is not None:
            with writing_to(folder):
                again = set_aside(folder, after)
                self._file = (folder / METRICS).open("a", encoding="utf-8")
                self._sinks = sinks(config or Config(), folder, after + 1 if again else None, restarts)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """A disk that fills up in the middle of a run costs the records, not the run."""
        try:
            self._append(kind, step, values)
        except OSError as error:
            print(f"{self._folder}: metrics end at step {step} ({error.strerror}); training goes on", file=sys.stderr)
            self._file = None
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for sink in list(self._sinks):
            self._or_without(sink, f"at step {step}", partial(sink.write, kind, step, numbers))

    def _append(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self._file is None:
            return
        finite = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")  # JSON knows no NaN
        self._file.flush()
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise OSError(ENOENT, "the folder, or the file in it, was deleted")

    def _or_without(self, sink: Sink, when: str, work: Callable[[], None]) -> None:
        """A disk, a network, another package may fail: that costs the sink, never the run."""
        try:
            work()
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            print(f"{type(sink).__name__} ends {when} ({reason}); training goes on", file=sys.stderr)
            self._sinks.remove(sink)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._folder is not None and self._file is not None:
            with writing_to(self._folder):
                self._file.close()
        for sink in list(self._sinks):
            self._or_without(sink, "unfinished", sink.close)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """A full disk, a missing right or a file in the way is the user's to mend: one line, not a traceback."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--run-dir {folder} cannot be written ({error.strerror}); choose another folder") from None
