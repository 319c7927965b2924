"""What a run shows on a terminal while it goes."""

from contextlib import nullcontext
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text


class StatusBar:
    """A progress bar with the latest record under it, on a terminal."""

    def __init__(self, total: int, console: Console, quiet: bool) -> None:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("", total=total)
        self._status = Text()
        drawn = console.is_terminal and not quiet
        self._live = Live(Group(self._bar, self._status), console=console) if drawn else nullcontext()

    def show(self, completed: int, status: str) -> None:
        self._bar.update(self._task, completed=completed)
        self._status.plain = status

    def __enter__(self) -> "StatusBar":
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)
