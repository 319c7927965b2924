"""Faults that a rank does to itself: `train_in_folder`, with one function of it changed on one rank.

Only the first attempt is disturbed: a rank that is started anew is well.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.chaos.faults import SAVING
from lockstep.checkpoint import checkpoints, manifest
from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.config import Config
from lockstep.data import Batch, mapped
from lockstep.layout.world import World
from lockstep.strategies import ParallelModel, StepResult
from lockstep.training.loop import train_in_folder
from lockstep.training.result import TrainResult

INJECTED = "injected"
SLOW = 0.05


def train_with_fault(
    world: World, config: Config, run_dir: str, resume: str | None, fault: str, step: int, rank: int
) -> TrainResult:
    """Train; at that step, or in the first save after it, that rank does it."""
    if world.rank == rank and world.restarts == 0:
        folder = Path(run_dir)
        if fault.startswith("save-"):
            _in_a_save(SAVING[int(fault.removeprefix("save-")) - 1], step, folder)
        elif fault == "full-disk":
            _full_disk(step, folder)
        elif fault in STEPS:
            _in_steps(STEPS[fault], step, folder)
    return train_in_folder(world, config, run_dir, resume)


def note(folder: Path) -> None:
    """When it was done, by the machine's monotonic clock."""
    (folder / INJECTED).write_text(repr(time.monotonic()))


# ---- in a step ---------------------------------------------------------------------------------------------------


def _in_steps(do: Callable[[ParallelModel, Batch], Batch], at: int, folder: Path) -> None:
    whole = ParallelModel.step
    taken = 0

    def step(self: ParallelModel, batch: Batch) -> StepResult:
        nonlocal taken
        taken += 1
        if taken == at:
            note(folder)
            batch = do(self, batch)
        return whole(self, batch)

    ParallelModel.step = step  # type: ignore[method-assign]


def _raise(_: ParallelModel, __: Batch) -> Batch:
    raise RuntimeError("a fault of chaos")


def _exit(_: ParallelModel, __: Batch) -> Batch:
    sys.exit(0)


def _wrong(_: ParallelModel, batch: Batch) -> Batch:
    dist.broadcast(torch.zeros(7), src=0)
    return batch


def _slow(strategy: ParallelModel, batch: Batch) -> Batch:
    strategy.model.register_forward_pre_hook(lambda *_: time.sleep(SLOW))  # from now on
    return batch


def _nan(_: ParallelModel, batch: Batch) -> Batch:
    spoilt = mapped(batch.inputs, lambda t: t * float("nan") if t.is_floating_point() else t)
    return Batch(spoilt, batch.targets, batch.filler)


STEPS: dict[str, Callable[[ParallelModel, Batch], Batch]] = {
    "raise": _raise,
    "exit": _exit,
    "wrong-collective": _wrong,
    "slow-rank": _slow,
    "nan": _nan,
}


# ---- in a save ---------------------------------------------------------------------------------------------------


def _in_a_save(moment: str, step: int, folder: Path) -> None:
    """Killed right after that has been done, for the first checkpoint of this step or later."""

    def killed_after(function: Callable[..., Any], meant: Callable[..., bool]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            done = function(*args, **kwargs)
            if meant(*args):
                note(folder)
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return run

    def late(path: Path) -> bool:
        return step_of(path) >= step

    match moment:
        case "folder made":
            Checkpoints._make_folder = killed_after(Checkpoints._make_folder, lambda _, part: late(part))  # type: ignore[method-assign]
        case "files written":
            Checkpoints._write_files = killed_after(Checkpoints._write_files, lambda _, __, part: late(part))  # type: ignore[method-assign]
        case "manifest written":
            manifest.write_manifest = killed_after(manifest.write_manifest, lambda part, _: late(part))
        case "renamed":
            manifest.sync_folder = killed_after(manifest.sync_folder, lambda where: renamed(where, late))
        case "pointed to":
            manifest.write_durably = killed_after(
                manifest.write_durably, lambda file, text: file.name == checkpoints.LATEST and late(Path(text.strip()))
            )


def step_of(path: Path) -> int:
    """Of step-00000030, .step-00000030.part, or something in it; -1 if it is none of these."""
    names = [part for part in path.parts if "step-" in part]
    return int(names[-1].strip(".").removeprefix("step-").removesuffix(".part")) if names else -1


def renamed(where: Path, late: Callable[[Path], bool]) -> bool:
    """The folder of checkpoints is made durable right after a new one has its name."""
    return where.name == checkpoints.CHECKPOINTS and any(late(f) for f in where.glob("step-*"))


def _full_disk(step: int, folder: Path) -> None:
    """The files of one checkpoint find no room."""
    from lockstep.checkpoint.storage import FileSystemWriter  # slow to import

    whole = FileSystemWriter.write_data
    failed = False

    def write(self: FileSystemWriter, plan: Any, planner: Any) -> Any:
        nonlocal failed
        if not failed and step_of(Path(self.path)) >= step:
            failed = True
            note(folder)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        return whole(self, plan, planner)

    FileSystemWriter.write_data = write  # type: ignore[method-assign, assignment]
