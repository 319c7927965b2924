"""A progress bar that is of use without a terminal too: there, a plain line now and then."""

import sys
import time
from typing import Any

from rich.progress import Progress, TaskID

EVERY = 10.0
"""Seconds between two lines."""


class Bar(Progress):
    """As rich's; where its output goes to a file or a pipe, it prints its progress to stderr."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._told = time.monotonic()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        if self.disable or self.console.is_terminal or time.monotonic() - self._told < EVERY:
            return
        self._told = time.monotonic()
        task = next(task for task in self.tasks if task.id == task_id)
        print(f"{task.description.strip()}: {task.percentage:.0f}%", file=sys.stderr, flush=True)
