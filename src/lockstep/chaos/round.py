"""One round: a run, a fault in it, and what came of it."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.chaos import nodes
from lockstep.chaos.command import LIMIT, Command, until
from lockstep.chaos.faults import Fault
from lockstep.chaos.inside import INJECTED
from lockstep.checkpoint.checkpoints import CHECKPOINTS
from lockstep.errors import UserError
from lockstep.inference.export import load_model
from lockstep.results.metrics import read_metrics
from lockstep.training.attempt import read_status, step_in_progress


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


def victim_of(setting: Setting, run: Path, fault: str, step: int, rank: int, *resume: str) -> Command:
    """A run, with a fault in it."""
    given = (setting.config, run, fault, step, rank, setting.nproc, setting.backend, setting.timeout, 3, *resume)
    return Command([sys.executable, "-m", "lockstep.chaos.victim", *map(str, given)])


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run)[0].state_dict()


@cache
def undisturbed(setting: Setting) -> dict[str, torch.Tensor]:
    """What every round should result in."""
    run = setting.folder / f"undisturbed-{setting.nproc}"
    victim = victim_of(setting, run, "none", 0, 0)
    if victim.wait(LIMIT) != 0:
        raise UserError(f"{setting.config} does not train, even undisturbed:\n{victim.output}")
    return weights(run)


def play(setting: Setting, fault: Fault, number: int, step: int, rank: int, expected: dict[str, Any]) -> Round:
    """One round: start, disturb, wait, compare."""
    result, before = Round(fault.name), traces(setting)
    if fault.name == "taken-port":
        _taken_port(setting, fault, result)
        result.left = sorted(traces(setting) - before)
        return result
    run = setting.folder / f"{number:03d}-{fault.name}"
    if fault.nodes:
        _play_on_nodes(setting, fault, run, step, result)
        expected = undisturbed(replace(setting, nproc=2))
    else:
        _play_here(setting, fault, run, step, rank, result)
    if fault.reported not in result.output:
        result.problem = result.problem or f"nothing said {fault.reported!r}"
    if not result.problem:
        restarts = [record for record in read_metrics(run) if record["kind"] == "restart"]
        result.lost = sum(int(record["lost"]) for record in restarts)
        found = weights(run)
        same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        result.equal = same if fault.equal else None
    result.left = sorted(traces(setting) - before) + [str(f.name) for f in (run / CHECKPOINTS).glob(".*.part")]
    return result


def _play_here(setting: Setting, fault: Fault, run: Path, step: int, rank: int, result: Round) -> None:
    victim = victim_of(setting, run, fault.name if fault.inside else "none", step, rank)
    try:
        hit = _injected(run) if fault.inside else _disturb(victim, run, fault, step, rank)
        if fault.after == "resumed":
            victim.wait(LIMIT)
            victim = victim_of(setting, run, "none", 0, 0, "auto")
        result.resumed = _goes_on(run, hit, fault)
        ended(result, victim.wait(LIMIT))
        seen = victim.said(fault.named)  # a launcher that was killed says nothing; its successor goes on
        result.named = None if seen is None else seen - hit
    except TimeoutError as late:
        victim.process.kill()
        victim.wait(1)
        result.problem = str(late)
    result.output = victim.output


def _play_on_nodes(setting: Setting, fault: Fault, run: Path, step: int, result: Round) -> None:
    """Two nodes of one rank each."""
    train = nodes.training(setting.config, run, setting.timeout)
    try:
        if fault.name == "kill-agent":
            with nodes.kill_agent(train, run, step, setting.folder) as (first, hit):
                try:
                    result.resumed = _goes_on(run, hit, fault)
                    ended(result, first.wait(LIMIT))
                finally:
                    seen = first.said(fault.named)
                    result.named, result.output = None if seen is None else seen - hit, first.output
            return
        hit, told_after, result.output = nodes.partition(train, run, step, setting.folder)
        result.named = max(told_after)
        again = nodes.Network(train, setting.folder)
        try:
            result.resumed = _goes_on(run, hit, fault)
            ended(result, again.wait())
            result.output += "\n".join(again.output())
        finally:
            again.end()
    except (TimeoutError, UserError) as problem:
        result.problem = str(problem)


def ended(result: Round, status: int | None) -> None:
    if status != 0 and not result.problem:
        result.problem = f"ended with status {status}" if status is not None else f"took longer than {LIMIT:.0f} s"


# ---- from outside ------------------------------------------------------------------------------------------------


def _disturb(victim: Command, run: Path, fault: Fault, step: int, rank: int) -> float:
    """Send the signal in that step, and damage what there is to damage; the time of the signal."""
    until(f"step {step}", lambda: step_in_progress(run) >= step)
    if fault.damage:
        until("a second checkpoint", lambda: len(_whole(run)) > 1)
    status = read_status(run)
    assert status is not None, "a run that takes steps has one"
    pid = victim.process.pid if fault.name == "kill-launcher" else status.ranks[rank][1]
    os.kill(pid, fault.signal)
    hit = time.monotonic()
    if fault.damage:  # when saving is over and reading has not begun
        until("the ranks' end", lambda: not any(psutil.pid_exists(pid) for _, pid in status.ranks))
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
    return float(until("the fault", lambda: (run / INJECTED).exists() and (run / INJECTED).read_text()))


def _taken_port(setting: Setting, fault: Fault, result: Round) -> None:
    """Ranks that are started one by one, at a port that another program has."""
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


def _goes_on(run: Path, hit: float, fault: Fault) -> float | None:
    """When the first step after the fault was taken."""
    if fault.after == "goes on":
        return None

    def again() -> bool:
        status = read_status(run)
        return status is not None and (status.restarts > 0 or fault.after == "resumed") and _fresh(run, hit)

    until("a step after the fault", again, LIMIT)
    return time.monotonic() - hit


def _fresh(run: Path, hit: float) -> bool:
    """The file of the step in progress is one of a later attempt, which has taken one."""
    began = (run / "status.json").stat().st_mtime - time.time() + time.monotonic()
    return began > hit and step_in_progress(run) > 0


def traces(setting: Setting) -> set[str]:
    """What runs leave behind where they are not careful."""
    found = {f"/dev/shm/{f.name}" for f in Path("/dev/shm").glob("*") if f.name.startswith(("lockstep-", "sem.mp-"))}
    for pattern in ("lockstep-[0-9]*", "torchelastic_*"):
        found |= {str(f) for f in Path(tempfile.gettempdir()).glob(pattern)}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(f"{setting.folder}{os.sep}" in word or "multiprocessing.spawn" in word for word in words[1:]):
            found.add(f"process {process.pid}")
    return found
