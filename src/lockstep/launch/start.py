"""How the ranks start: through torch's elastic agent, or under torchrun or srun.

`run_on_ranks(function, *args)` is all that the floors above know. If this process is already a rank (torchrun and
srun say so in the environment), the function runs here; if not, an elastic agent starts `nproc` ranks on this
machine, watches them, ends all when one fails, and hands back what the first failing one had to say.
"""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lockstep.errors import UserError
from lockstep.launch.adopt import adopt_environment
from lockstep.launch.cores import available_cores, changed_environment
from lockstep.launch.failure import explain, said_something
from lockstep.launch.join import check_known, choose_device, join_world
from lockstep.launch.leftovers import FOLDER_PREFIX, remove_leftovers
from lockstep.launch.options import Launch, Process
from lockstep.launch.processes import signature
from lockstep.launch.rank import (
    FOLDER,
    StartMethod,
    ctrl_c_held_back,
    die_with_parent,
    rank_main,
    report_and_leave,
    unless_it_leaves,
)
from lockstep.launch.restart import with_restarts
from lockstep.words import counted

START_METHOD: StartMethod | None = None
"""Of ranks, where the caller does not say."""


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    launch: Launch,
    default_nproc: int = 1,
    threads: int | None = None,
    start_method: StartMethod | None = None,
    saves_when_stopped: bool = False,
    max_restarts: int = 0,
    apart: bool = False,
) -> list[Any]:
    """Run `function(world, *args)` on every rank; return the results of this machine's ranks in rank order.

    Under torchrun or srun this process is one rank, and the list holds its own result only. `threads`: cores of each
    rank that we start; None: an equal part of the machine's, or what OMP_NUM_THREADS says. `start_method`: see
    `rank.py`. `saves_when_stopped`: Ctrl-C is left to the function, which ends in good order; a second one is not.
    `max_restarts`: how often all ranks are started anew when one fails; the function must know where to go on.
    `apart`: a single rank too is a process of its own.
    """
    if adopt_environment():
        size = int(os.environ["WORLD_SIZE"])
        if launch.nproc is not None and launch.nproc != size:
            raise UserError(
                f"--nproc {launch.nproc} was given, but torchrun or srun started {size} ranks; leave --nproc out"
            )
        return [_as_external_rank(function, args, launch)]
    if launch.timeout <= 0:
        raise UserError(f"--timeout is {launch.timeout:g}, but it must be more than 0 s")
    nproc = launch.nproc if launch.nproc is not None else default_nproc
    check_nproc(launch, nproc)
    if launch.backend is not None:
        check_known(launch.backend)
    if falls_back_to_cpu(launch, nproc):
        print(f"{nproc} ranks on the CPU: there are fewer GPUs here (--share-gpu lets ranks share one)")
        launch = replace(launch, device="cpu")
    choose_device(launch.device, 0, nproc, launch.share_gpu)  # refuse here, in one voice, not on each rank
    if nproc == 1 and not max_restarts and not apart and threads in (None, torch.get_num_threads()):
        with join_world(launch.device, launch.backend, launch.share_gpu, launch.timeout) as world:
            return [function(world, *args)]
    run_id = uuid.uuid4().hex
    method = start_method or START_METHOD or usual_method(launch)
    start = partial(_start_ranks, function, args, launch, nproc, threads, method, saves_when_stopped, run_id)
    return with_restarts(start, max_restarts)


def usual_method(launch: Launch) -> StartMethod:
    """Ranks of a command on CPUs are forks of one process that has imported torch. A GPU's driver, and macOS's own
    libraries, are not made for that.
    """
    on_cpus = launch.device == "cpu" or not torch.cuda.is_available()
    return "forkserver" if Process.is_command and on_cpus and sys.platform == "linux" else "spawn"


RANKS_PER_CORE = 4


def check_nproc(launch: Launch, nproc: int) -> None:
    if nproc < 1:
        raise UserError(f"--nproc is {nproc}, but it must be 1 or more")
    most = max(8, RANKS_PER_CORE * available_cores())
    on_cpu = launch.device == "cpu" or not torch.cuda.is_available()
    if on_cpu and nproc > most and not launch.oversubscribe:
        raise UserError(
            f"--nproc {nproc} would start {nproc} processes on {counted(available_cores(), 'core')}, each with its own "
            f"torch; at most {most} make sense here: lower it, or add --oversubscribe"
        )


def falls_back_to_cpu(launch: Launch, nproc: int) -> bool:
    """More ranks than GPUs, and no flag says where they are to run."""
    chosen = launch.nproc is not None or launch.device != "auto" or launch.share_gpu
    return not chosen and 0 < torch.cuda.device_count() < nproc


def _as_external_rank(function: Callable[..., Any], args: tuple[Any, ...], launch: Launch) -> Any:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent; were it killed, the rank would train on without it
        die_with_parent(os.getppid())
    try:
        with join_world(launch.device, launch.backend, launch.share_gpu, launch.timeout) as world:
            return unless_it_leaves(world.rank, function, world, *args)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        report_and_leave(error)


def _start_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    launch: Launch,
    nproc: int,
    threads: int | None,
    start_method: StartMethod,
    saves_when_stopped: bool,
    run_id: str,
) -> list[Any]:
    """One elastic agent, `nproc` ranks on loopback."""
    for name in list(logging.root.manager.loggerDict):  # the agent's loggers; we report the failure ourselves
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    remove_leftovers()
    with rank_environment(nproc, threads):
        if start_method == "forkserver":
            start_server()
        with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{signature()}-") as log_dir:
            before, tempfile.tempdir = tempfile.tempdir, log_dir  # torch leaves error files in the temporary folder
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=nproc,
                run_id=run_id,
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",  # port 0: the system picks a free one
                local_addr="127.0.0.1",
                max_restarts=0,  # ours: `restart.py`
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=log_dir),
                start_method=start_method,
                signals_to_handle="SIGHUP,SIGQUIT",  # SIGTERM and SIGINT are ours: see `passing_on`
            )
            try:
                with passing_on(saves_when_stopped) as received, ctrl_c_held_back():
                    start = elastic_launch(config, rank_main)
                    results = start(
                        function, args, launch, os.getpid(), start_method, {**os.environ, FOLDER: os.getcwd()}, log_dir
                    )
            except ChildFailedError as error:
                if received and not said_something(error):
                    raise KeyboardInterrupt(f"{received[0]}: all ranks were ended") from None
                explained = explain(error)
                raise explained from explained.__cause__
            except SignalException as error:
                raise KeyboardInterrupt(f"{signal.Signals(error.sigval).name}: all ranks were ended") from None
            finally:
                tempfile.tempdir = before
    return [pickle.loads(results[rank]) for rank in sorted(results)]


def rank_environment(nproc: int, threads: int | None) -> AbstractContextManager[None]:
    """Inside, ranks that start inherit this; what the user has set wins."""
    settings = {
        "OMP_NUM_THREADS": str(max(1, available_cores() // nproc)),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "TORCH_CPP_LOG_LEVEL": "FATAL",  # else ranks whose peer is gone fill the screen; we report which failed first
    }
    settings = {name: value for name, value in settings.items() if name not in os.environ}
    if threads is not None:
        settings["OMP_NUM_THREADS"] = str(threads)
    return changed_environment(**settings)


PRELOADED: tuple[str, ...] = ("torch._dynamo",)
"""What else the server imports: else each rank would, when it makes an optimizer, for seconds."""


def start_server() -> None:
    """The process that ranks are forks of, once for all launches; it imports what we have imported of ours."""
    imported = sorted(name for name in sys.modules if name.startswith("lockstep.") and not name.endswith("__main__"))
    multiprocessing.set_forkserver_preload(["lockstep.launch.rank", *imported, *PRELOADED])
    with ctrl_c_held_back():
        forkserver.ensure_running()
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()  # when all is imported: here Ctrl-C is heard while we wait
    first.join()


CTRL_C_PASSED_ON = signal.SIGUSR2
"""Ctrl-C that this process received; a run that saves reads it (`training/stopping.py`), others end."""
TO_STOP = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a run to end in good order: SIGUSR1 is Slurm's word that the time limit is near (--signal=USR1@120)."""


@contextmanager
def passing_on(saves_when_stopped: bool) -> Iterator[list[str]]:
    """Hand SIGTERM and SIGUSR1 to the ranks and go on waiting for them: training saves and returns, others end.

    The agent's own way is to drop the ranks' results and to kill them after 30 s, which may cut a save short. Ctrl-C
    ends the ranks at once; or, where they save, it is like SIGTERM the first time, and the second ends them. Gives the
    names of the signals that have come.
    """
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def pass_on(number: int, _: object) -> None:
        received.append("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        at_once = number == signal.SIGINT and (not saves_when_stopped or received.count("Ctrl-C") > 1)
        ranks = multiprocessing.active_children()
        if not ranks:  # none has started yet
            raise KeyboardInterrupt(received[-1])
        for rank in ranks:
            if at_once:
                rank.kill()
            elif rank.pid is not None:  # a terminal sends Ctrl-C to the ranks too: not twice
                os.kill(rank.pid, CTRL_C_PASSED_ON if number == signal.SIGINT else number)

    before = {number: signal.signal(number, pass_on) for number in (*TO_STOP, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
