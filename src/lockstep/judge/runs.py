"""Start a command through the shell, watched, and end it when all its ranks have taken the steps."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import psutil

from lockstep.judge.changes import Settings
from lockstep.judge.ledger import RECORDED
from lockstep.judge.store import Process, processes
from lockstep.launch.join import share_gpu_environment

LOG = "output.txt"
LINES = 8
"""Of what a command has said last, to be shown when it failed."""
ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt)\b")
"""The last line of a traceback."""
OF_TORCHRUN = "ChildFailedError"
"""What torchrun says of a rank's error, and not the error."""
LEAST_DISK = 1_000_000
POLL = 0.05
GRACE = 3.0
"""Seconds to end by itself."""
WATCHED = "LOCKSTEP_JUDGE"
"""The variable by which a process knows where to record."""
SHARES_GPU = "LOCKSTEP_JUDGE_SHARES_GPU"
"""That by which each rank is its own host to NCCL, and its local rank 0."""


@dataclass
class Run:
    """What came of a command."""

    command: str
    folder: Path
    processes: list[Process]
    problem: str | None = None
    """Why it cannot be judged by."""
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """That all ranks have taken."""
        return min((len(list(process.of("step"))) for process in self.processes), default=0)


def run(
    command: str,
    folder: Path,
    settings: Settings,
    timeout: float,
    tick: Callable[[list[Process]], bool] = lambda _: True,
) -> Run:
    """Until it has taken its steps on every rank, has ended, or has said nothing new for `timeout` seconds.

    `tick`: given what has been recorded so far; False ends the command.
    """
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(asdict(settings)), encoding="utf-8")
    hook = str(files("lockstep.judge") / "hook")
    path = os.environ.get("PYTHONPATH")
    environment = {
        **RECORDED,
        **os.environ,
        WATCHED: str(folder.absolute()),
        "PYTHONPATH": hook + (os.pathsep + path if path else ""),
        **({**share_gpu_environment(0), SHARES_GPU: "1"} if settings.share_gpu else {}),
    }
    begun = time.monotonic()
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            shell=True,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            problem = _until_done(process, folder, timeout, tick)
        finally:
            _end(process, folder)
    found = processes(folder)
    done = Run(command, folder, found, problem, time.monotonic() - begun)
    if problem is None and done.steps == 0:
        done.problem = unseen(found) or f"{nothing_seen(found)}; it said last:\n{said_last(folder)}"
    return done


def _until_done(
    process: "subprocess.Popen[bytes]", folder: Path, timeout: float, tick: Callable[[list[Process]], bool]
) -> str | None:
    """Why it is no good, if it is not."""
    written, since = -1, time.monotonic()
    while True:
        status = process.poll()
        size = sum(file.stat().st_size for file in folder.glob("*.jsonl"))
        if size != written:
            written, since = size, time.monotonic()
            found = processes(folder)
            if not tick(found):
                return None
            if unseen(found) is not None:
                return None
            done = [one for one in found if any(one.of("done"))]
            if done and len({one.rank for one in done}) == done[0].size:
                return None
        if status is not None:
            return None if status == 0 else failed(status, folder)
        if time.monotonic() - since > timeout:
            return f"nothing new came for {timeout:.0f} s: it hangs, or needs longer (--timeout)\n{said_last(folder)}"
        time.sleep(POLL)


def failed(status: int, folder: Path) -> str:
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    if shutil.disk_usage(folder).free < LEAST_DISK:
        return f"no space left in {folder.parent} (TMPDIR says where tensors are kept)"
    return f"the command failed ({ended}); it said last:\n{said_last(folder)}"


def said_last(folder: Path) -> str:
    """Its last lines, and before them the last error: torchrun's summary is longer than what there is room for."""
    with (folder / LOG).open("rb") as log:
        log.seek(max(0, (folder / LOG).stat().st_size - 200_000))
        lines = log.read().decode(errors="replace").splitlines()
    last = lines[-LINES:]
    errors = [line for line in lines[:-LINES] if ERROR.match(line) and OF_TORCHRUN not in line]
    return "\n".join(f"    {line[:200]}" for line in [*errors[-1:], *last])


def unseen(found: list[Process]) -> str | None:
    """What a watcher could not see."""
    return next((f"on rank {one.rank}: {event['why']}" for one in found for event in one.of("cannot")), None)


def nothing_seen(found: list[Process]) -> str:
    if not found:
        return (
            "no step of an optimizer was seen: is it a PyTorch script with a torch.optim optimizer, and does it run "
            "Python with its environment (not -I, -E or -S)?"
        )
    return "a model was called, but not all ranks' optimizers took a step"


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """The command and all that it has started, also what has left its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while (left := started(folder)) and time.monotonic() < deadline:
        process.poll()
        time.sleep(POLL)
    for one in left:
        with suppress(psutil.Error):
            one.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def started(folder: Path) -> list[psutil.Process]:
    """Processes that are watched for this folder, and live."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if one.status() != psutil.STATUS_ZOMBIE and one.environ().get(WATCHED) == str(folder.absolute()):
                found.append(one)
    return found
