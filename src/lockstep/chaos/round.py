"""One round: a run, a fault in it, and what came of it."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.chaos.faults import Fault
from lockstep.chaos.inside import INJECTED
from lockstep.checkpoint.checkpoints import CHECKPOINTS
from lockstep.errors import UserError
from lockstep.training.attempt import read_status, step_in_progress
from lockstep.training.export import load_model
from lockstep.training.metrics import METRICS, records_of

LIMIT = 120.0
"""Seconds that a round may take in all."""


@dataclass
class Round:
    """What came of one fault."""

    fault: str
    named: float | None = None
    """Seconds from the fault to the line that names it; None: no line did."""
    resumed: float | None = None
    """Seconds from the fault to the first step that was taken after it."""
    lost: int = 0
    """Steps that had to be taken again."""
    equal: bool | None = None
    """Whether the weights at the end are those of an undisturbed run; None: they are not meant to be."""
    left: list[str] = field(default_factory=list)
    """What is still there: processes, shared memory, temporary folders, half checkpoints."""
    output: str = ""
    problem: str = ""
    """Why it did not end as it should."""


@dataclass(frozen=True)
class Setting:
    """What is the same in all rounds."""

    config: Path
    folder: Path
    nproc: int = 2
    backend: str = "auto"
    timeout: float = 5.0


class Victim:
    """A run in a process of its own, and what it says, line by line, with the time of each."""

    def __init__(self, setting: Setting, run: Path, fault: str, step: int, rank: int, *resume: str) -> None:
        given = (setting.config, run, fault, step, rank, setting.nproc, setting.backend, setting.timeout, 3, *resume)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.chaos.victim", *map(str, given)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait(self, seconds: float) -> int | None:
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            status = None
            self.process.wait()
        self._reader.join(5)
        return status

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run)[0].state_dict()


def undisturbed(setting: Setting) -> dict[str, torch.Tensor]:
    """What every round should come to."""
    run = setting.folder / "undisturbed"
    victim = Victim(setting, run, "none", 0, 0)
    if victim.wait(LIMIT) != 0:
        raise UserError(f"{setting.config} does not train, even undisturbed:\n{victim.output}")
    return weights(run)


def play(setting: Setting, fault: Fault, number: int, step: int, rank: int, expected: dict[str, Any]) -> Round:
    """One round: start, disturb, wait, compare."""
    result, before = Round(fault.name), traces()
    if fault.name == "taken-port":
        _taken_port(setting, fault, result)
        result.left = sorted(traces() - before)
        return result
    run = setting.folder / f"{number:03d}-{fault.name}"
    victim = Victim(setting, run, fault.name if fault.inside else "none", step, rank)
    try:
        hit = _injected(run) if fault.inside else _disturb(victim, run, fault, step, rank)
        if fault.after == "resumed":
            victim.wait(LIMIT)
            victim = Victim(setting, run, "none", 0, 0, "auto")
        result.resumed = _goes_on(run, hit, fault)
        status = victim.wait(LIMIT)
    except TimeoutError as late:
        victim.process.kill()
        result.problem = str(late)
        status = victim.wait(1)
    else:
        result.named = _named(victim, fault, hit)
    result.output = victim.output
    if fault.told not in result.output:
        result.problem = result.problem or f"nothing said {fault.told!r}"
    if status != 0 and not result.problem:
        result.problem = f"ended with status {status}" if status is not None else f"took longer than {LIMIT:.0f} s"
    if not result.problem:
        restarts = [record for record in records_of(run / METRICS) if record["kind"] == "restart"]
        result.lost = sum(int(record["lost"]) for record in restarts)
        found = weights(run)
        same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        result.equal = same if fault.equal else None
    result.left = sorted(traces() - before) + [str(f.name) for f in (run / CHECKPOINTS).glob(".*.part")]
    return result


# ---- from outside ------------------------------------------------------------------------------------------------


def _until(what: str, ready: Any, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.002)
    return found


def _disturb(victim: Victim, run: Path, fault: Fault, step: int, rank: int) -> float:
    """Send the signal in that step, and damage what there is to damage; the time of the signal."""
    _until(f"step {step}", lambda: step_in_progress(run) >= step)
    if fault.damage:
        _until("a second checkpoint", lambda: len(_whole(run)) > 1)
    status = read_status(run)
    assert status is not None, "a run that takes steps has one"
    pid = victim.process.pid if fault.name == "kill-launcher" else status.ranks[rank][1]
    os.kill(pid, fault.signal)
    hit = time.monotonic()
    if fault.damage:  # when nobody saves any more, and nobody reads yet
        _until("the ranks' end", lambda: not any(psutil.pid_exists(pid) for _, pid in status.ranks))
        _damage(_whole(run)[-1], fault.damage)
    return hit


def _whole(run: Path) -> list[Path]:
    return sorted(f for f in (run / CHECKPOINTS).glob("step-*") if (f / "manifest.json").exists())


def _damage(checkpoint: Path, how: str) -> None:
    """As a disk, or a person, might."""
    first, *others = sorted(checkpoint.glob("*.distcp"))
    content = first.read_bytes()
    match how:
        case "cut":
            first.write_bytes(content[: len(content) // 2])
        case "flip":
            middle = len(content) // 2
            first.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        case "remove":
            first.unlink()
        case "swap":
            first.write_bytes(others[0].read_bytes())
            others[0].write_bytes(content)


def _injected(run: Path) -> float:
    return float(_until("the fault", lambda: (run / INJECTED).exists() and (run / INJECTED).read_text()))


def _taken_port(setting: Setting, fault: Fault, result: Round) -> None:
    """Ranks that somebody starts one by one, at a port that another program has."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        named = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        environment = {**os.environ, **named, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "lockstep", "train", str(setting.config), "--timeout", str(setting.timeout)]
        start = time.monotonic()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    result.output = done.stdout + done.stderr
    if re.search(fault.named, result.output):
        result.named = time.monotonic() - start
    if done.returncode == 0:
        result.problem = "it went on, with a port that is another's"


# ---- what came of it ---------------------------------------------------------------------------------------------


def _named(victim: Victim, fault: Fault, hit: float) -> float | None:
    """When the first line came that names it. A launcher that was killed says nothing; its successor goes on."""
    return next((at - hit for at, line in victim.lines if fault.named and re.search(fault.named, line)), None)


def _goes_on(run: Path, hit: float, fault: Fault) -> float | None:
    """When the first step after the fault was taken."""
    if fault.after == "goes on":
        return None

    def again() -> bool:
        status = read_status(run)
        return status is not None and (status.restarts > 0 or fault.after == "resumed") and _fresh(run, hit)

    _until("a step after the fault", again, LIMIT)
    return time.monotonic() - hit


def _fresh(run: Path, hit: float) -> bool:
    """The file of the step in progress is one of a later attempt, which has taken one."""
    began = (run / "status.json").stat().st_mtime - time.time() + time.monotonic()
    return began > hit and step_in_progress(run) > 0


def traces() -> set[str]:
    """What runs leave behind where they are not careful."""
    found = {f"/dev/shm/{f.name}" for f in Path("/dev/shm").glob("*") if f.name.startswith(("lockstep-", "sem.mp-"))}
    found |= {str(f) for f in Path(tempfile.gettempdir()).glob("lockstep-[0-9]*")}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "lockstep.chaos.victim" in words or any("multiprocessing.spawn" in word for word in words):
            found.add(f"process {process.pid}")
    return found
