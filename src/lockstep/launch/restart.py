"""Ranks that fail are started anew, all of them; they find by themselves where to go on (`training/attempt.py`).

Each attempt has an agent of its own. torchrun does the same with `--max-restarts`, and there an attempt may have other
ranks: what we ask about an attempt here is true of both.
"""

import os
import platform
import shutil
import sys
import uuid
from collections.abc import Callable
from typing import Any

from lockstep.errors import RankError, UserError
from lockstep.launch.cores import changed_environment
from lockstep.launch.leftovers import MEMORY, memory_of
from lockstep.launch.processes import signature, started
from lockstep.words import counted

RESTARTS = "LOCKSTEP_RESTARTS"


def restart_count() -> int:
    """How often the ranks have been started anew, by our launcher or by torchrun."""
    return int(os.environ.get(RESTARTS) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def launch_id() -> str | None:
    """What all attempts of one launch have in common, and no other launch has; None: it is never started anew.

    torchrun's --rdzv-id, which its user chooses; where he has not, the agent's process.
    """
    chosen = os.environ.get("TORCHELASTIC_RUN_ID")
    if chosen is None:
        return None
    return chosen if chosen != "none" else f"{platform.node()}-{os.getppid()}-{started(os.getppid())}"


def with_restarts(attempt: Callable[[], list[Any]], max_restarts: int) -> list[Any]:
    """Its result; after at most `max_restarts` more attempts, the first one's error.

    A mistake in what was asked for would only repeat itself, and ends it at once.
    """
    memory = memory_of(f"{signature()}-{uuid.uuid4().hex[:8]}")
    try:
        with changed_environment(**{MEMORY: str(memory) if max_restarts else ""}):
            return _repeated(attempt, max_restarts)
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def _repeated(attempt: Callable[[], list[Any]], max_restarts: int) -> list[Any]:
    failures: list[Exception] = []
    while True:
        try:
            with changed_environment(**{RESTARTS: str(len(failures))}):
                return attempt()
        except UserError as mistake:
            if not failures:
                raise
            raise RankError(_summary(failures, str(mistake))) from failures[0].__cause__
        except RankError as error:
            failures.append(error)
            if not max_restarts:
                raise
            if len(failures) > max_restarts:
                raise RankError(_summary(failures, f"--max-restarts {max_restarts} are spent")) from error.__cause__
        said = str(failures[-1]).splitlines()[0]
        print(f"{said}; all ranks are started anew ({len(failures)} of {max_restarts})", file=sys.stderr, flush=True)


def _summary(failures: list[Exception], end: str) -> str:
    """The first failure is the one to mend; of the last, what it was."""
    first, last = str(failures[0]), str(failures[-1]).splitlines()[0]
    others = "" if len(failures) == 1 or last == first.splitlines()[0] else f"\nthe last failure: {last}"
    return f"{end}, after {counted(len(failures), 'failure')}; the first: {first}{others}"
