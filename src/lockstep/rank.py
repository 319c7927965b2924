"""The life of one rank that we have started ourselves.

CPU ranks are forks of a server process that has imported this module, and with it torch: that takes seconds, which
four ranks on two cores would pay twice over. The server does nothing else, so there is no thread and no lock that a
fork could break. GPU ranks start afresh: a driver that the server had only looked at would be of no use to them.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lockstep.world import join_world

if TYPE_CHECKING:
    from lockstep.launch import Launch

_BEFORE = dict(os.environ)
"""Of the server, or of a rank that started afresh, before the agent has told it who it is."""


def rank_main(
    function: Callable[..., Any], args: tuple[Any, ...], launch: "Launch", environment: dict[str, str]
) -> Any:
    """What the agent calls (it wraps it in `@record` itself)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, also inside a collective, and silently
    threading.Thread(target=end_with_launcher, daemon=True).start()
    take_over(environment)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with join_world(launch.device, launch.backend, launch.share_gpu, launch.timeout) as world:
        return function(world, *args)


def take_over(environment: dict[str, str]) -> None:
    """The launcher's environment as it is now (the server knows an older one), with what the agent has set."""
    by_the_agent = {name: value for name, value in os.environ.items() if _BEFORE.get(name) != value}
    os.environ.clear()
    os.environ.update(environment | by_the_agent)


def end_with_launcher() -> None:
    """Leave no orphan when the launcher itself is killed. (It need not be our parent: that may be the server.)"""
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "a rank is started by multiprocessing"
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)
