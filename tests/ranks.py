"""Start real ranks for a test function, return each rank's result, end the lot at a time-out."""

import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.launch import Launch, run_on_ranks

LONG = 400.0
"""Seconds that nothing takes, even on a machine that is busy with other things: it bounds a hang, and measures nothing.
pytest's own limit is longer.
"""


def on_ranks(function: Callable[..., Any], nproc: int, *args: Any, timeout: float = LONG) -> list[Any]:
    """`function(world, *args)` on `nproc` CPU ranks. Functions must live at the top of a test module.

    The ranks are forks of a server that has torch imported, which saves seconds each time; those of commands, and of
    `test_launch.py`, start afresh.
    """
    launch = Launch(nproc=nproc, device="cpu", timeout=timeout)
    return run_on_ranks(function, *args, launch=launch, start_method="forkserver")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def left_in_shm() -> set[str]:
    """Names of ours in shared memory, where none should stay."""
    return {path.name for path in Path("/dev/shm").glob("lockstep-*")}


def refused(tries: Iterable[Callable[[], Any]]) -> list[str]:
    """What each of them is refused with; "nothing" where it is not."""
    said = []
    for attempt in tries:
        try:
            attempt()
            said.append("nothing")
        except UserError as error:
            said.append(str(error))
    return said
