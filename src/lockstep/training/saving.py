"""What of a run outlives it: when it is saved, to the disk and to memory, and how a run goes on from it."""

import shutil
import time
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.checkpoint.checkpoints import CHECKPOINTS, Checkpoints, check_same_course
from lockstep.checkpoint.manifest import MANIFEST, read_run
from lockstep.checkpoint.on_nodes import CheckpointsOnNodes, nodes_of
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.launch.leftovers import memory_home
from lockstep.layout.world import World
from lockstep.strategies import ParallelModel, StepResult
from lockstep.training.logger import ConsoleLogger
from lockstep.words import counted


@dataclass
class Best:
    """The lowest test loss, and how long ago it was. Part of a checkpoint: a resumed run goes on counting."""

    loss: float = inf
    step: int = 0
    since: int = 0
    """Evaluations that have found nothing lower."""

    def saw(self, loss: float, step: int) -> bool:
        """Whether this is the lowest so far."""
        if loss < self.loss:
            self.loss, self.step, self.since = loss, step, 0
            return True
        self.since += 1
        return False


def best_of(saved: dict[str, Any]) -> Best:
    """What a checkpoint says of it; nothing where it says what we do not write."""
    best = saved.get("best")
    try:
        return Best(float(best["loss"]), int(best["step"]), int(best["since"])) if best else Best()
    except (TypeError, ValueError, KeyError):
        return Best()


class Saving:
    """The checkpoints of one run, as its loop uses them. Every rank must call the same methods after the same step."""

    def __init__(
        self,
        world: World,
        config: Config,
        folder: Path | None,
        strategy: ParallelModel,
        logger: ConsoleLogger,
        course: dict[str, Any],
    ) -> None:
        """`folder`: of the run; None: nothing is saved. `course`: what the data's position depends on."""
        self.world, self.strategy, self.logger, self.course = world, strategy, logger, course
        self.asked = asked = config.checkpoint
        self.disk: Checkpoints | None = None
        self.memory: Checkpoints | None = None
        """Copies of the state that outlive the ranks, and no more than that."""
        self.best = Best()
        self.saved_at = -1
        """The step of the last checkpoint on the disk."""
        self._when = time.monotonic()
        self.due = False
        """The first rank's clock has said so, and all ranks have heard it."""
        alone = world.size > 1 and strategy.layout.norm.size == 1  # ranks that do not wait for each other: one saves
        if folder is None or (alone and not world.is_main):
            return
        savers = World(device=world.device) if alone else world
        given = (savers, folder / CHECKPOINTS, asked.keep_last, asked.asynchronous)
        self.disk = Checkpoints(*given, parameters=strategy.parameters)
        if asked.in_memory and (home := memory_home()) is not None:
            self.memory = self._in_memory(savers, home, self.disk.group)
        if self.to_the_end or asked.keep_best or self.memory is not None:
            self.disk.get_ready()

    def _in_memory(self, world: World, home: Path, group: dist.ProcessGroup | None) -> Checkpoints:
        """In the one folder of this machine, or on each node with a copy of its neighbour's."""
        nodes = nodes_of(home, world, group)
        assert self.disk is not None
        how: dict[str, Any] = {"keep_last": 1, "asynchronous": self.asked.asynchronous}
        how["snapshots"] = self.disk.snapshots
        if group is None or len(nodes) == 1:
            return Checkpoints(world, home, group=group, **how)
        return CheckpointsOnNodes(world, home, nodes, group, **how)

    @property
    def to_the_end(self) -> bool:
        """Whether a run that is done leaves a checkpoint of its last step."""
        return bool(self.asked.every or self.asked.every_seconds)

    # ---- saving ----------------------------------------------------------------------------------------------

    def watch_the_clock(self) -> None:
        """Before a step: ranks' clocks differ, so the first one's decides, and the step broadcasts it."""
        seconds = self.asked.every_seconds
        if seconds is not None and self.world.is_main and time.monotonic() - self._when >= seconds:
            self.strategy.request_save()
            self._when = time.monotonic()

    def heard(self, result: StepResult) -> None:
        """What a step has broadcast to all ranks."""
        self.due = self.due or result.save

    def after_step(self, step: int) -> None:
        """To the disk by steps or seconds; and first to memory, if that is due too: until the disk has all of it, the
        newest whole copy would be an older one.
        """
        if self.memory is not None and step % self.asked.in_memory == 0:
            self._save_to(self.memory, step)
        if (self.asked.every and step % self.asked.every == 0) or self.due:
            self.save(step)

    def save(self, step: int, wait: bool = False) -> None:
        """To the disk; `wait` until it is there."""
        if self.disk is None:
            return
        if wait and self.saved_at == step:
            self.disk.wait()
        if not wait or self.saved_at != step or self.disk.failed is not None:
            self._save_to(self.disk, step, wait)
            self.saved_at, self._when, self.due = step, time.monotonic(), False
        self.report_problems(step)

    def _save_to(self, place: Checkpoints, step: int, wait: bool = False) -> None:
        start = time.perf_counter()
        for other in (self.disk, self.memory):  # they share a group, and what is sent in it must not mix
            if other is not None:
                other.wait()
        self.report_problems(step)  # of the save before
        best = asdict(self.best) if isfinite(self.best.loss) else None
        keep = self.best.step if best is not None and self.asked.keep_best and place is self.disk else None
        place.save(self.strategy, {"step": step, **self.course, "best": best}, wait, best=keep)
        self.logger.was_away("saving", start)

    def evaluated(self, loss: float, step: int) -> None:
        """The lowest so far is worth a checkpoint, where it is to be kept."""
        if self.best.saw(loss, step) and self.asked.keep_best:
            self.save(step)

    def wait(self) -> None:
        """Until what is being written is done, well or not."""
        for place in (self.disk, self.memory):
            if place is not None:
                place.wait()

    def finish(self, step: int, stopped: bool) -> str | None:
        """The run is over: why the checkpoint that it should leave is not there, if it is not."""
        if self.disk is None:
            return None
        if stopped or self.to_the_end:
            self.save(step, wait=True)
            return self.disk.failed
        if self.asked.keep_best:
            self.disk.wait()
            self.report_problems(step)
            return self.disk.failed
        return None

    def forget_memory(self) -> None:
        """A launcher of ours would do it, torchrun would not."""
        if self.memory is not None and self.world.local_rank == 0:
            shutil.rmtree(self.memory.folder, ignore_errors=True)

    def report_problems(self, step: int) -> None:
        for place, where in ((self.disk, ""), (self.memory, "in memory: ")):
            if place is not None and place.problem is not None:
                self.logger.warn(f"{where}{place.problem}; training goes on")
                self.logger.record("checkpoint", step, {"problem": where + place.problem})
                place.problem = None

    # ---- going on --------------------------------------------------------------------------------------------

    def resume(self, source: Path) -> int:
        """From a run's newest whole checkpoint, or from one checkpoint; its step."""
        one = source if (source / MANIFEST).exists() else None
        home = source.parent if one is not None else source / CHECKPOINTS
        place = self._reading(home)
        found = self._find(place, one)
        if found is None:
            raise UserError(f"{home} has no whole checkpoint to go on from")
        return self._load(place, found)

    def go_on(self, folder: Path) -> int:
        """With an attempt of the same launch: from the newest whole state, in memory or on the disk; else from 0."""
        places = [self._reading(folder / CHECKPOINTS), *([self.memory] if self.memory is not None else [])]
        found = [(state.name, place, state) for place in places if (state := self._find(place)) is not None]
        if not found:
            self.logger.say("no step was saved: this attempt starts at the beginning")
            return 0
        _, place, state = max(found, key=lambda one: one[0])  # step-00000120
        return self._load(place, state)

    def _find(self, place: Checkpoints, one: Path | None = None) -> Path | None:
        """The newest whole checkpoint there."""
        found, damage = place.find(one)
        for line in damage:
            self.logger.warn(f"damaged, passed over: {line}")
        return found

    def _reading(self, home: Path) -> Checkpoints:
        return Checkpoints(self.world, home, group=self.disk.group if self.disk is not None else None)

    def _load(self, place: Checkpoints, found: Path) -> int:
        check_same_course(read_run(found), self.course, found)
        saved = place.load(found, self.strategy)
        self.best = best_of(saved)
        ranks = "" if saved["ranks"] == self.world.size else f", saved by {counted(saved['ranks'], 'rank')}"
        self.logger.say(f"resumed at step {saved['step']} from {found}{ranks}")
        return int(saved["step"])
