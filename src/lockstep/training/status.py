"""What a run shows on a terminal while it goes: one calm line."""

from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class StatusBar:
    """epoch 2/10 ━━━━━━ 120/600 0:00:12 < 0:00:48 loss 2.3026  1,234 samples/s"""

    def __init__(self, total: int, epochs: int, console: Console, quiet: bool) -> None:
        columns = (
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self._epochs = epochs
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("", total=total, status="", epoch=f"1/{epochs}")
        drawn = console.is_terminal and not quiet
        self._live = Live(self._bar, console=console) if drawn else nullcontext()

    def show(self, completed: int, epoch: int, status: str) -> None:
        self._bar.update(self._task, completed=completed, epoch=f"{epoch}/{self._epochs}", status=status)

    def __enter__(self) -> "StatusBar":
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)
