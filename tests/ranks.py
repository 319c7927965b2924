"""Start real ranks for a test function, return each rank's result, end the lot at a time-out."""

import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from lockstep.errors import UserError
from lockstep.launch import Launch, run_on_ranks

LONG = 400.0
"""Seconds that nothing takes, even on a machine that is busy with other things: it bounds a hang, and measures nothing.
pytest's own limit is longer.
"""


def on_ranks(function: Callable[..., Any], nproc: int, *args: Any, timeout: float = LONG) -> list[Any]:
    """`function(world, *args)` on `nproc` CPU ranks. Functions must live at the top of a test module.

    The ranks are forks of a server that has torch imported, which saves seconds each time (`conftest.py`).
    """
    launch = Launch(nproc=nproc, device="cpu", timeout=timeout)
    return run_on_ranks(function, *args, launch=launch, start_method="forkserver")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def left_in_shm() -> set[str]:
    """Names in shared memory, where none should stay: of this process, of those that it started, or of dead ones."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    found = {path.name for path in Path("/dev/shm").glob("lockstep-*")}
    owners = {name: name.split("-")[2] for name in found}
    return {
        name for name, pid in owners.items() if not pid.isdigit() or int(pid) in ours or not psutil.pid_exists(int(pid))
    }


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
