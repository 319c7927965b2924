"""Checkpoints: saved under any strategy and number of ranks, loaded under any other; whole or not at all.

A checkpoint is a folder `step-00000120` of torch.distributed.checkpoint's files, one or more per rank, with names and
shapes that no layout changes (`strategies/state.py`), and beside them

    run.json        the step, the loss scale, what the data's position depends on
    manifest.json   every other file's size and checksum

How it is saved, so that no crash leaves a half one:

1. every rank copies its tensors (`snapshot.py`; on CPUs the only time that training waits), and goes on
2. beside training, the ranks write their files into `.step-00000120.part`, and to the disk itself (fsync)
3. the first rank writes the manifest, renames the folder, then points `latest` to it, and only then removes old ones

A rank that is killed before the rename leaves a `.part`, which the next run removes. A full disk is an error of step 2:
the `.part` is removed, a warning printed, and training goes on.
"""

import json
import os
import random
import re
import shutil
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lockstep.checkpoint import manifest
from lockstep.checkpoint.snapshot import Snapshot, Snapshots
from lockstep.comm.collectives import all_gather_objects
from lockstep.errors import UserError
from lockstep.launch.calls import LONG
from lockstep.layout.world import World
from lockstep.strategies.loss_scale import LossScale
from lockstep.strategies.state import EngineState

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in the run's folder."""
LATEST = "latest"
BEST = "best"
"""A link to the checkpoint of the lowest test loss, where a run keeps it."""
STEP = re.compile(r"step-\d{8,}")
"""The name of a checkpoint."""
LOWEST_PRIORITY = 19
LITTLE = 2**20
"""Bytes that are left on a disk on which a file could not be finished."""
BYTES_PER_PARAMETER = 16
"""Of a checkpoint: fp32 weights and two moments, generously."""
SLOWEST_DISK = 20e6
"""Bytes per second. Ranks write at the speed of their disks, and wait for each other that much longer."""


def saving_timeout(world: World, parameters: int) -> timedelta:
    """How long ranks wait for one another in a save: what `--timeout` says, and the time that writing may take."""
    return timedelta(seconds=world.timeout + parameters * BYTES_PER_PARAMETER / SLOWEST_DISK)


class Saved(Protocol):
    """What is saved and loaded: a strategy, or a loop of the user's own."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def state(self) -> EngineState: ...
    @property
    def loss_scale(self) -> LossScale | None: ...
    @property
    def waits_for_copies(self) -> bool:
        """`optimizer_waits_for` can be asked of it."""
        ...

    def optimizer_waits_for(self, copied: torch.cuda.Event) -> None:
        """Its next step writes to parameters and moments only when these copies have been made."""


class Checkpoints:
    """The checkpoints of one run, in one folder that all ranks see."""

    def __init__(
        self,
        world: World,
        folder: Path,
        keep_last: int = 3,
        asynchronous: bool = True,
        group: dist.ProcessGroup | None = None,
        parameters: int = 0,
        snapshots: Snapshots | None = None,
    ) -> None:
        """`parameters`: of the model, for how long a save may take. `snapshots`: of savers that take turns."""
        self.world, self.folder, self.keep_last, self.asynchronous = world, folder, keep_last, asynchronous
        # A group of its own: writing goes on beside training, and must not come between training's collectives.
        # Where ranks may be lost while it is made, it is of a kind that can be interrupted.
        backend = world.backend if world.keeps_going else "gloo"
        self.group = group or (
            dist.new_group(backend=backend, timeout=saving_timeout(world, parameters), group_desc=f"{LONG}checkpoints")
            if world.size > 1
            else None
        )
        self._saving: threading.Thread | None = None
        self.snapshots = snapshots or Snapshots()
        self.problem: str | None = None
        """Why the last save failed, until it has been reported."""
        self.failed: str | None = None
        """Why the newest save of all failed; None if it is on the disk."""

    # ---- saving ----------------------------------------------------------------------------------------------

    def save(self, strategy: Saved, run: dict[str, Any], wait: bool = False, best: int | None = None) -> None:
        """Save the strategy as it is now, and `run` (which has the `step`). Every rank must call it.

        `best`: the step whose checkpoint is to be kept, however old it is.
        """
        self.wait()
        strategy.state.before_saving()
        beside = self.asynchronous and not wait
        state = {**strategy.state.state_dict(), f"rng.{self.world.rank}": random_state(self.world.device)}
        buffers = {f"model.{name}" for name, _ in strategy.model.named_buffers()}
        taken = self.snapshots.take(state, beside and strategy.waits_for_copies, buffers)
        if taken.copied is not None:
            strategy.optimizer_waits_for(taken.copied)
        run = {**run, "ranks": self.world.size}
        if strategy.loss_scale is not None:
            run["loss_scale"] = strategy.loss_scale.state_dict()
        if beside:
            self._saving = threading.Thread(target=self._write_beside, args=(taken, run, best), daemon=True)
            self._saving.start()
        else:
            self._write(taken.wait(), run, best)

    @property
    def saving(self) -> bool:
        """A save is being written."""
        return self._saving is not None and self._saving.is_alive()

    def wait(self) -> None:
        """Until the last save is done, well or not."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None

    def _write_beside(self, taken: Snapshot, run: dict[str, Any], best: int | None) -> None:
        """On a core that training has no use for at the moment: there is no hurry."""
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            self._write(taken.wait(), run, best)
        except (RuntimeError, ValueError) as error:  # another rank is gone, or the group: training says which, and why
            self.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.problem = f"checkpoint step-{run['step']:08d} was not saved: {self.failed}"

    def _write(self, state: dict[str, Any], run: dict[str, Any], best: int | None) -> None:
        name = f"step-{run['step']:08d}"
        part = self.folder / f".{name}.part"
        problem = self._agree(self._attempt(lambda: self._make_folder(part)))
        files: dict[str, dict[str, Any]] = {}
        everyone: list[dict[str, dict[str, Any]]] = []
        if problem is None:
            problem = self._agree(self._attempt(lambda: files.update(self._write_files(state, part))))
        if problem is None:
            everyone = self._gather(files)
            problem = self._agree(self._copy(part, everyone))
        if problem is None:
            complete = None
            if self.publishes:
                complete = self._attempt(lambda: self._publish(part, name, run, everyone, best))
            problem = self._agree(complete)
        self.failed = problem
        if problem is not None:
            self.problem = f"checkpoint {name} was not saved: {problem}"
            if self.publishes:
                clean(self.folder)

    @staticmethod
    def get_ready() -> None:
        """Import now what takes long to import, before the first save would do it beside training."""
        from lockstep.checkpoint import storage  # noqa: F401

    def _attempt(self, action: Any) -> str | None:
        """Do it; if it fails, say why, so that all ranks can give up together."""
        try:
            action()
        except Exception as error:  # the disk is full, a right is missing, ...: training goes on without this one
            if isinstance(error, RuntimeError) and self._free_bytes() < LITTLE:  # torch's words are "unexpected pos"
                return f"{self.folder}: No space left on device"
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return None

    def _free_bytes(self) -> float:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:  # there is no such folder
            return inf

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self.group is None else all_gather_objects(value, self.group)

    def _agree(self, problem: str | None) -> str | None:
        """The first rank's problem that has one."""
        if self.group is None:
            return problem
        everyone = self._gather(problem)
        return next((f"rank {rank}: {p}" for rank, p in enumerate(everyone) if p is not None), None)

    @property
    def publishes(self) -> bool:
        """Whether this rank makes the folder, and turns it into a checkpoint when all files are there."""
        return self.world.is_main

    def _make_folder(self, part: Path) -> None:
        if self.publishes:
            clean(self.folder)
            part.mkdir(parents=True)

    def _write_files(self, state: dict[str, Any], part: Path) -> dict[str, dict[str, Any]]:
        """Write this rank's part; returns the description of the files that this rank has written."""
        from lockstep.checkpoint import storage

        storage.write(state, part, self.group)
        mine = [f for f in part.iterdir() if f.name.startswith(f"__{self.world.rank}_")]
        return manifest.describe(mine + ([part / manifest.METADATA] if self.world.is_main else []))

    def _copy(self, part: Path, files: list[dict[str, dict[str, Any]]]) -> str | None:
        """Where the folder is not common to all ranks: what each has written, to others. Returns what went wrong."""
        return None

    def _publish(
        self, part: Path, name: str, run: dict[str, Any], described: list[dict[str, dict[str, Any]]], best: int | None
    ) -> None:
        manifest.write_durably(part / manifest.RUN, json.dumps(run, indent=1))
        files = {k: v for rank in described for k, v in rank.items()}
        manifest.write_manifest(part, {**files, **manifest.describe([part / manifest.RUN])})
        target, aside = self.folder / name, self.folder / f".{name}.old"
        if target.exists():  # a run that was resumed has come by here before
            target.rename(aside)
        part.rename(target)
        manifest.sync_folder(self.folder)
        try:
            manifest.write_durably(self.folder / LATEST, name + "\n")
        except OSError:
            shutil.rmtree(target, ignore_errors=True)
            raise
        finally:
            clean(self.folder)
        kept = None if best is None else self.folder / f"step-{best:08d}"
        if kept is not None and kept.is_dir():
            link = self.folder / f".{BEST}.new"
            link.unlink(missing_ok=True)
            link.symlink_to(kept.name)
            link.replace(self.folder / BEST)
        older = [folder for folder in self.all() if folder.name <= name]
        for old in older[: -self.keep_last] if self.keep_last else []:
            if old != kept:
                shutil.rmtree(old, ignore_errors=True)

    # ---- loading ---------------------------------------------------------------------------------------------

    def all(self) -> list[Path]:
        """Oldest first."""
        return sorted(f for f in self.folder.glob("step-*") if f.is_dir() and STEP.fullmatch(f.name))

    def _latest(self) -> Path | None:
        """What `latest` points to, if that is the name of a checkpoint."""
        try:
            name = (self.folder / LATEST).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return self.folder / name if STEP.fullmatch(name) else None

    def newest_whole(self, candidates: list[Path] | None = None) -> tuple[Path | None, list[str]]:
        """The one to go on from, and what is wrong with those that had to be passed over."""
        if candidates is None:
            candidates = list(reversed(self.all()))
            candidates += sorted(self.folder.glob(".step-*.old"), reverse=True)  # set aside, and then killed
            pointed = self._latest()
            if pointed is not None:  # else killed before the first one was pointed to
                candidates = [pointed, *(c for c in candidates if c != pointed)]
        damage = []
        for candidate in candidates:
            try:
                manifest.check(candidate)
            except manifest.DamagedError as error:
                damage.append(str(error))
            else:
                return candidate, damage
        return None, damage

    def find(self, one: Path | None = None) -> tuple[Path | None, list[str]]:
        """The newest whole one, or the one that was named if it is whole; found by the first rank, broadcast to all."""
        found: list[tuple[Path | None, list[str]]] = [(None, [])]
        if self.world.is_main:
            found = [self.newest_whole([one] if one is not None else None)]
        if self.group is not None:
            dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

    def load(self, folder: Path, strategy: Saved) -> dict[str, Any]:
        """Fill the strategy; returns what was saved as `run`. `folder` must have been checked."""
        return load_checkpoint(folder, strategy, self.world, self.group)


def clean(folder: Path) -> None:
    """Remove what a save that was cut short has left; put back a checkpoint that it had set aside."""
    for aside in folder.glob(".step-*.old"):
        original = folder / aside.name[1:].removesuffix(".old")
        if not original.exists():
            aside.rename(original)
    for leftover in [*folder.glob(".step-*.part"), *folder.glob(".step-*.old")]:
        shutil.rmtree(leftover, ignore_errors=True)


def load_checkpoint(
    folder: Path,
    strategy: Saved,
    world: World,
    group: dist.ProcessGroup | None = None,
    fetch: Callable[[set[str]], None] | None = None,
) -> dict[str, Any]:
    """`fetch`: gets files that this rank is going to read, where the folder may not have all of them."""
    from lockstep.checkpoint import storage

    run = manifest.read_run(folder)
    state = strategy.state.to_load(storage.saved_names(folder))
    if run["ranks"] == world.size:
        state[f"rng.{world.rank}"] = random_state(world.device)
    else:
        state.pop(f"own.{world.rank}", None)
    if fetch is not None:
        fetch(storage.files_of(state, folder))
    storage.read_into(state, folder, group)
    rng = state.pop(f"rng.{world.rank}", None)
    strategy.state.load(state)
    try:
        if strategy.loss_scale is not None and "loss_scale" in run:
            strategy.loss_scale.load_state_dict(run["loss_scale"])
        if rng is not None:
            restore_random_state(rng, world.device)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise manifest.DamagedError(f"{folder}: its random state or loss scale is damaged ({error})") from error
    return run


def random_state(device: torch.device) -> dict[str, Any]:
    """Of every generator that training draws from on this rank."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def check_same_course(run: dict[str, Any], expected: dict[str, Any], folder: Path) -> None:
    """Data go on where they stopped only if they are the same data in the same batches."""
    for key, value in expected.items():
        if run.get(key) != value:
            if key == "initial_weights":
                raise UserError(
                    f"{folder} has adapters only, and the frozen weights follow from the seed in another way now; "
                    f"load it with the version that saved it, and export it there"
                )
            raise UserError(
                f"{folder} was saved with {key} {run.get(key)}, and this run has {value}: its data would not go on "
                f"where they stopped; use the same, or start without --resume"
            )
