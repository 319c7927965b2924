"""The folder of a run: which one, whose it is, and what it goes on from.

One rank decides and broadcasts it: ranks that each looked at their own clock, or their own disk, would decide
differently.
"""

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from lockstep.checkpoint.checkpoints import CHECKPOINTS
from lockstep.checkpoint.manifest import MANIFEST
from lockstep.comm.collectives import all_gather_objects
from lockstep.config import Config, load_config
from lockstep.config.user_code import shown_name
from lockstep.data import DataSpec, Kind
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.results.whole import write_whole
from lockstep.strange import json_of
from lockstep.training.attempt import all_ends, read_status

CONFIG = "config.yaml"
LOCK = ".lock"
SPEC = "data.json"


@dataclass
class RunFolder:
    """Where a run writes, and what it goes on from."""

    folder: Path
    source: Path | None = None
    """A run's folder, or one checkpoint. None: it starts from the beginning."""
    passed_over: tuple[str, ...] = ()
    """Newer runs that do not fit this one, and why."""
    ended_in: tuple[int, ...] | None = None
    """Where this is another attempt of one launch: the steps in which the earlier ones ended."""
    batch_size: int | None = None
    """Of that launch's first attempt, which had other ranks perhaps. The global batch stays what it was."""


def choose_folder(world: World, config: Config, run_dir: str | None, resume: str | None) -> RunFolder:
    """The first rank's choice, on every rank; and a mistake that it finds, on every rank."""
    chosen: RunFolder | str = ""
    if world.is_main:
        try:
            chosen = _attempted(world, config, run_dir) or _choose(config, run_dir, resume)
        except UserError as mistake:
            chosen = str(mistake)
        except OSError as error:
            chosen = (
                f"{error.filename or run_dir or 'runs'} cannot be read ({error.strerror}); choose another --run-dir"
            )
    first: RunFolder | str = all_gather_objects(chosen)[0]
    if isinstance(first, str):
        raise UserError(first)
    return first


def _attempted(world: World, config: Config, run_dir: str | None) -> RunFolder | None:
    """The folder of this launch's earlier attempt, if there was one. It failed, or was stopped and has saved: torchrun
    stops the ranks when a node comes, and starts them anew together with its own.
    """
    if world.launch is None:
        return None
    runs = [Path(run_dir)] if run_dir else sorted(Path("runs").glob(f"*-{task_of(config)}-*"), reverse=True)
    for run in runs:
        status = read_status(run)
        if status is None or status.launch != world.launch or status.state == "done":
            continue
        batch_size = load_config(run / CONFIG).train.batch_size if config.train.batch_per_rank is not None else None
        train = replace(config.train, batch_size=batch_size or config.train.batch_size)
        if _misfit(replace(config, train=train), run):
            continue
        ends = all_ends(run, status)
        if status.state in ("running", "failed") and len(ends) > 1 and ends[-1] == ends[-2]:
            raise UserError(
                f"two attempts in a row ended in step {ends[-1]}; another would too, so it is not started (go on with "
                f"--resume {run} when the cause is mended)"
            )
        return RunFolder(run, run, (), tuple(ends), batch_size)
    return None


def task_of(config: Config) -> str:
    return f"{shown_name(config.model)}-{shown_name(config.data)}"


def _choose(config: Config, run_dir: str | None, resume: str | None) -> RunFolder:
    task = task_of(config)
    if resume is None:
        return RunFolder(Path(run_dir) if run_dir else _new_folder(config, task))
    if resume == "auto":
        if run_dir:
            here = Path(run_dir)
            return RunFolder(here, here if newest_checkpoint(here) else None)
        return _newest_that_fits(config, task)
    source = Path(resume)
    if not source.is_dir():
        raise UserError(f"--resume {resume}: there is no such folder; give a run's folder, a checkpoint, or auto")
    home = source.parent.parent if (source / MANIFEST).exists() else source
    return RunFolder(Path(run_dir) if run_dir else home, source)


def _new_folder(config: Config, task: str) -> Path:
    """A name that no other run has: two may start in the same second."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{task}-{config.parallel.data}"
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def newest_checkpoint(run: Path) -> float:
    """When the run's newest checkpoint was written; 0 if it has none."""
    times = []
    for folder in (run / CHECKPOINTS).glob("step-*"):
        try:
            times.append(folder.stat().st_mtime)
        except FileNotFoundError:  # a run that is alive has removed it meanwhile
            continue
    return max(times, default=0.0)


def _newest_that_fits(config: Config, task: str) -> RunFolder:
    """By the time of their last checkpoints: of the runs of this model and data, the newest that has the same sizes."""
    runs = [run for run in Path("runs").glob(f"*-{task}-*") if newest_checkpoint(run)]
    passed_over: list[str] = []
    for run in sorted(runs, key=newest_checkpoint, reverse=True):
        reason = _misfit(config, run)
        if reason is None:
            return RunFolder(run, run, tuple(passed_over))
        passed_over.append(f"{run} is not resumed: {reason}")
    return RunFolder(_new_folder(config, task), None, tuple(passed_over))


def _misfit(config: Config, run: Path) -> str | None:
    """Why a run cannot be gone on with under this config."""
    try:
        theirs = load_config(run / CONFIG)
    except UserError as error:
        return f"its config cannot be read ({error})"
    old_train, train = theirs.train, config.train
    pairs: list[tuple[str, object, object]] = [
        *((name, getattr(theirs, name), getattr(config, name)) for name in ("model", "data", "lora")),
        *((f"train.{key}", getattr(old_train, key), getattr(train, key)) for key in ("batch_size", "seed")),
    ]
    for name, old, new in pairs:
        if old != new:
            return _difference(name, old, new)
    return None


def _difference(name: str, old: object, new: object) -> str:
    if hasattr(old, "__dict__") and hasattr(new, "__dict__"):
        keys = [key for key in vars(new) if vars(old).get(key) != vars(new)[key]]
        if keys:
            return f"it has {name}.{keys[0]} {vars(old).get(keys[0])}, and this run {vars(new)[keys[0]]}"
    return f"it has {name} {old}, and this run {new}"


@contextmanager
def locked(world: World, folder: Path) -> Iterator[None]:
    """While the run lasts, no other run may write to the folder. Refused on every rank alike."""
    mistake, descriptor, was_there = "", -1, True
    if world.is_main:
        try:
            was_there = folder.exists()
            descriptor = _open_lock(folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            while not _is_still_there(folder, descriptor):  # a run that failed has removed it meanwhile
                os.close(descriptor)
                descriptor = _open_lock(folder)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            mistake = f"{folder} is being written by another run ({owner}); choose another --run-dir, or wait for it"
        except OSError as error:
            mistake = f"--run-dir {folder} cannot be written ({error.strerror}); choose another folder"
    mistake = all_gather_objects(mistake)[0]
    try:
        if mistake:
            raise UserError(mistake)
        yield
    finally:
        if descriptor >= 0:
            if not was_there and not mistake:
                _remove_if_empty(folder)
            os.close(descriptor)  # and the lock is gone


def _open_lock(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)


def _is_still_there(folder: Path, descriptor: int) -> bool:
    """Whether what we have locked is what others would find."""
    try:
        return (folder / LOCK).stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _remove_if_empty(folder: Path) -> None:
    """A run that failed before it wrote anything leaves nothing."""
    with suppress(OSError):  # the user has put something there: it stays
        if {f.name for f in folder.iterdir()} <= {LOCK}:
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()


# ---- what its samples look like ------------------------------------------------------------------------------


def write_spec(run: Path, spec: DataSpec) -> None:
    """What samples look like, so that a model can be built again without its data."""
    about = {"kind": spec.kind, "shape": spec.shape, "classes": spec.classes}
    write_whole(run / SPEC, json.dumps(about) + "\n")


def read_spec(run: Path) -> DataSpec | None:
    """As a run has written it; None where it has not, or where it is none."""
    try:
        about = json_of(run / SPEC)
        kind, shape, classes = about["kind"], tuple(int(size) for size in about["shape"]), int(about["classes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    usable = kind in get_args(Kind) and len(shape) <= 8 and all(0 < size < 2**31 for size in (*shape, classes))
    return DataSpec(kind, shape, classes) if usable else None
