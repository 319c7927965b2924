"""How the ranks start: by our own hand through torch's elastic agent, or by torchrun or srun, whom we follow.

`run_on_ranks(function, *args)` is all that the floors above know. If this process is already a rank (torchrun and
srun say so in the environment), the function runs here; if not, an elastic agent starts `nproc` ranks on this
machine, watches them, ends all when one fails, and hands back what the first failing one had to say.
"""

import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lockstep.errors import RankError, UserError
from lockstep.rank import StartMethod, ctrl_c_held_back, rank_main
from lockstep.world import DeviceChoice, World, choose_device, join_world


@dataclass
class Launch:
    """Which ranks run the command."""

    nproc: int | None = None
    """Ranks to start on this machine. None: 1 for train; 2 for demo, bench and profile; what --world-size says for
    verify and bench scaling. Under torchrun or srun the ranks are theirs; leave it out there."""
    device: DeviceChoice = "auto"
    """auto: a GPU where there is one."""
    backend: str | None = None
    """Communication backend. None: nccl on GPUs, shm (shared memory) on the CPUs of one machine, gloo on several."""
    share_gpu: bool = False
    """Let several ranks share one GPU over NCCL: correct everywhere, as slow as a 20 Gbit/s network."""
    timeout: float = 300.0
    """Seconds after which a missing or silent rank is an error."""


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    launch: Launch,
    default_nproc: int = 1,
    threads: int | None = None,
    start_method: StartMethod = "spawn",
) -> list[Any]:
    """Run `function(world, *args)` on every rank; return the results of this machine's ranks in rank order.

    Under torchrun or srun this process is one rank, and the list holds its own result only. `threads`: cores of each
    rank that we start; None: an equal part of the machine's, or what OMP_NUM_THREADS says. `start_method`: see
    `rank.py`.
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
    if nproc < 1:
        raise UserError(f"--nproc is {nproc}, but it must be 1 or more")
    if falls_back_to_cpu(launch, nproc):
        print(f"{nproc} ranks on the CPU: there are fewer GPUs here (--share-gpu lets ranks share one)")
        launch = replace(launch, device="cpu")
    choose_device(launch.device, 0, nproc, launch.share_gpu)  # refuse here, in one voice, not on each rank
    if nproc == 1 and threads in (None, torch.get_num_threads()):
        with join_world(launch.device, launch.backend, launch.share_gpu, launch.timeout) as world:
            return [function(world, *args)]
    return _start_ranks(function, args, launch, nproc, threads, start_method)


def falls_back_to_cpu(launch: Launch, nproc: int) -> bool:
    """More ranks than GPUs, and nobody has said where they are to run."""
    chosen = launch.nproc is not None or launch.device != "auto" or launch.share_gpu
    return not chosen and 0 < torch.cuda.device_count() < nproc


def own_cores() -> set[int]:
    """Cores that this process may use, which a container, `taskset` or srun may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(psutil.cpu_count() or 1))


def available_cores() -> int:
    return len(own_cores())


def use_cores(cores: set[int]) -> None:
    """Let this process, and the threads that it will start, use them."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def adopt_environment() -> bool:
    """True if somebody else started this process as a rank. srun's variables are translated to torch's."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return True
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return False
    slurm = os.environ
    first_host = _first_host(slurm.get("SLURM_STEP_NODELIST", slurm.get("SLURM_JOB_NODELIST", "127.0.0.1")))
    os.environ.update(
        RANK=slurm["SLURM_PROCID"],
        WORLD_SIZE=slurm["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=slurm["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(_tasks_on_this_node(slurm)),
    )
    os.environ.setdefault("MASTER_ADDR", first_host)
    # All ranks of the job must name the same free port without talking: derive it from the job's number.
    os.environ.setdefault("MASTER_PORT", str(20000 + int(slurm.get("SLURM_JOB_ID", "0")) % 20000))
    return True


def _tasks_on_this_node(slurm: Mapping[str, str]) -> int:
    """`4(x2),3`: four tasks on each of two nodes, then three."""
    per_node: list[int] = []
    for part in slurm.get("SLURM_STEP_TASKS_PER_NODE", slurm["SLURM_STEP_NUM_TASKS"]).split(","):
        tasks, _, nodes = part.rstrip(")").partition("(x")
        per_node += [int(tasks)] * int(nodes or 1)
    return per_node[min(int(slurm.get("SLURM_NODEID", "0")), len(per_node) - 1)]


def _first_host(nodelist: str) -> str:
    """`node[03-05,9],x1` -> `node03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodelist)
    assert match is not None, nodelist
    return match.group(1) + (match.group(2) or "")


def _as_external_rank(function: Callable[..., Any], args: tuple[Any, ...], launch: Launch) -> Any:
    @record  # torchrun shows the traceback of the rank that failed first; a user's mistake needs none
    def rank_main() -> Any:
        try:
            with join_world(launch.device, launch.backend, launch.share_gpu, launch.timeout) as world:
                return function(world, *args)
        except UserError as mistake:
            return mistake

    result = rank_main()
    if isinstance(result, UserError):
        raise result
    return result


@contextmanager
def changed_environment(**values: str) -> Iterator[None]:
    """For the processes that start meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _start_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    launch: Launch,
    nproc: int,
    threads: int | None,
    start_method: StartMethod,
) -> list[Any]:
    """One elastic agent, `nproc` ranks on loopback."""
    for name in list(logging.root.manager.loggerDict):  # the agent's loggers; we tell the failure ourselves
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    settings = {  # inherited by the ranks; what the user has set wins
        "OMP_NUM_THREADS": str(max(1, available_cores() // nproc)),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    settings = {name: value for name, value in settings.items() if name not in os.environ}
    if threads is not None:
        settings["OMP_NUM_THREADS"] = str(threads)
    _remove_leftovers()
    with changed_environment(**settings):
        if start_method == "forkserver":
            _start_server()
        with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{os.getpid()}-") as log_dir:
            before, tempfile.tempdir = tempfile.tempdir, log_dir  # torch leaves error files in the temporary folder
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=nproc,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",  # port 0: the system picks a free one
                local_addr="127.0.0.1",
                max_restarts=0,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=log_dir),
                start_method=start_method,
                signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # SIGTERM is ours: see `_passing_on_sigterm`
            )
            try:
                with _passing_on_sigterm() as received, ctrl_c_held_back():
                    start = elastic_launch(config, rank_main)
                    results = start(function, args, launch, os.getpid(), start_method, dict(os.environ))
            except ChildFailedError as error:
                if received:
                    raise KeyboardInterrupt("SIGTERM: all ranks were ended") from None
                raise _explain(error) from None
            except SignalException as error:
                raise KeyboardInterrupt(f"{signal.Signals(error.sigval).name}: all ranks were ended") from None
            finally:
                tempfile.tempdir = before
    return [results[rank] for rank in sorted(results)]


def _start_server() -> None:
    """The process that ranks are forks of, once for all launches; it imports what we have imported of ours."""
    imported = sorted(name for name in sys.modules if name.startswith("lockstep.") and not name.endswith("__main__"))
    multiprocessing.set_forkserver_preload(["lockstep.rank", *imported])
    forkserver.ensure_running()


@contextmanager
def _passing_on_sigterm() -> Iterator[list[int]]:
    """Hand SIGTERM to the ranks and go on waiting for them: training saves and returns, anything else ends.

    The agent's own way is to drop the ranks' results and to kill them after 30 s, which may cut a save short.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        for rank in multiprocessing.active_children():
            rank.terminate()

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


FOLDER_PREFIX = "lockstep-"


def _remove_leftovers() -> None:
    """Folders of launchers that were killed before they could clean up, known by the process id in their name."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX).split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _explain(error: ChildFailedError) -> Exception:
    """The first failure: what the rank raised, if that says all there is to say, else with its traceback."""
    rank, failure = error.get_first_failure()
    text = _failure_text(failure)
    kind, _, message = text.partition(": ")
    if kind == UserError.__name__:
        return UserError(message)
    if kind == RankError.__name__:
        return RankError(message)
    callstack = ""
    if isinstance(failure.error_file_data, dict):
        details = failure.error_file_data.get("message", {})
        if isinstance(details, dict):
            callstack = details.get("extraInfo", {}).get("py_callstack", "")
    return RankError(f"rank {rank} failed first (exit code {failure.exitcode}): {text}\n{callstack}".rstrip())


def _failure_text(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"it was ended by {signal.Signals(-failure.exitcode).name}"
    message = failure.message
    return str(message.get("message", message)) if isinstance(message, dict) else str(message)


__all__ = ["Launch", "RankError", "World", "adopt_environment", "run_on_ranks"]
