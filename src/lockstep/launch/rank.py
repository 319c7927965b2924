"""The life of one rank that we have started ourselves.

A rank starts afresh (`spawn`), as a program of its own would; or it is forked from a server that has imported torch
(`forkserver`), which saves each rank seconds of imports. A fork has the streams, limits and import path that the
launcher had when the server started. So it is for processes that do not change these before or between launches: a
command, on CPUs, and a test suite.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, Literal, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lockstep.errors import HangError, PeerError, RankError
from lockstep.launch.join import join_world
from lockstep.launch.leftovers import note_semaphores
from lockstep.launch.options import Launch
from lockstep.launch.watch import current_watch

StartMethod = Literal["spawn", "forkserver"]
FOLDER = "LOCKSTEP_FOLDER"
"""The folder to run in, which the launcher gives to a fork."""
_AT_IMPORT = dict(os.environ)
"""Of the server, if this is one of its forks: before the agent has given the rank its number."""


def rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    launch: Launch,
    launcher: int,
    start_method: StartMethod,
    environment: dict[str, str],
    folder: str,
) -> bytes:
    """What the agent calls (it wraps it in `@record` itself). `folder`: the launcher's temporary one.

    The result goes as plain bytes. Tensors as such would go as file descriptors, which the launcher would have to fetch
    from this process, one connection for each.
    """
    become_a_rank(launcher, start_method, environment, folder)
    try:
        with join_world(launch.device, launch.backend, launch.share_gpu, launch.timeout) as world:
            return pickle.dumps(unless_it_leaves(world.rank, function, world, *args))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever it is: a test's failure is no Exception
        # Into its file, for the launcher, who shows the first failure; and not to the screen, where the cause would
        # drown in what the other ranks say about it.
        get_error_handler().record_exception(explained(error))
        if blames_another(error):
            time.sleep(LET_THE_CAUSE_COME_FIRST)
        leave()


def become_a_rank(launcher: int, start_method: StartMethod, environment: dict[str, str], folder: str) -> None:
    """Of the launcher: what a process does first."""
    end_at_ctrl_c()
    note_semaphores(folder)
    if start_method == "forkserver":
        become_a_rank_of_now(environment)
    else:
        die_with_parent(launcher)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def report_and_leave(error: BaseException) -> NoReturn:
    """A rank of torchrun's or srun's, who show what each has said: one line where the cause is another rank, and the
    traceback where it is here. torchrun, who reads the record, has it in its summary.
    """
    reason = explained(error)
    get_error_handler().record_exception(reason)
    if blames_another(error):
        time.sleep(LET_THE_CAUSE_COME_FIRST)
        print(f"[rank {os.environ.get('RANK', '0')}] error: {reason}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    leave()


def leave() -> NoReturn:
    """At once: threads of gloo's, of a save and of others would be waited for first, or end the process by SIGABRT,
    and then that would be what one sees.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def explained(error: BaseException) -> BaseException:
    """Where ranks have missed each other: what all ranks were doing, if that can be found out."""
    watch, said = current_watch(), None
    if watch is not None and has_missed_its_peers(error):
        said = watch.explain_timeout()
    elif watch is not None and any(words in str(error) for words in CLOSED):
        said = watch.explain_closed()
    return error if said is None else HangError(f"the ranks hung: {said}")


def has_missed_its_peers(error: BaseException) -> bool:
    """They did not come in time (gloo: "Timed out", "Application timeout"), or gloo got other bytes than expected."""
    return any(words in str(error) for words in (*LATE, "did not answer within", "op.preamble"))


CLOSED = ("closed by peer", "reset by peer")
"""What gloo says of a rank that has gone."""
LATE = ("imed out", " timeout")
"""What backends say of a rank that does not come."""


LET_THE_CAUSE_COME_FIRST = 0.3
"""Seconds, in which the agent sees the rank end that this one complains of."""


def blames_another(error: BaseException) -> bool:
    """It is about a rank that is gone, or silent: the cause is over there."""
    text = str(error)
    return isinstance(error, PeerError) or any(words in text for words in (*CLOSED, *LATE))


def unless_it_leaves(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """A rank that leaves with sys.exit() has not done its work, and the others would wait for it."""
    try:
        return function(*args)
    except SystemExit as leaving:
        raise RankError(f"rank {rank} left with sys.exit({leaving.code!r}) before its work was done") from leaving


@contextmanager
def ctrl_c_held_back() -> Iterator[None]:
    """Processes that start meanwhile hear of Ctrl-C when they ask for it: Python would answer it with a traceback from
    the midst of its imports. This process hears of it through another thread.
    """
    resource_tracker.ensure_running()  # else the first start would start it, and unblock the signals that we block
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


def end_at_ctrl_c() -> None:
    """At once, also inside a collective, and silently."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def die_with_parent(parent: int) -> None:
    """Leave no orphan when the parent itself is killed: Linux sends us SIGKILL then."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before we asked
            sys.exit(1)  # silently: who ended it has said why


# ---- forks of the server ------------------------------------------------------------------------------------


def become_a_rank_of_now(environment: dict[str, str]) -> None:
    """A fork knows the environment, the folder and the random numbers of the server's start."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    by_the_agent = {name: value for name, value in os.environ.items() if _AT_IMPORT.get(name) != value}
    os.environ.clear()
    os.environ.update(environment | by_the_agent)
    os.chdir(os.environ.pop(FOLDER))
    torch.seed()


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "a rank is started by multiprocessing"
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)
