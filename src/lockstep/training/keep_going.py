"""A run that goes on when ranks are lost: generation after generation of the same run, each with the ranks there are.

In each generation, what a run consists of (groups, model, reader, files) is made anew:

1. the ranks that are there form their groups, and say how many steps they have taken
2. those that have taken the most give their weights and the optimizer's state to those that have taken fewer: to one
   that was lost in the middle of a step, when others had finished it, and to one that has just been started
3. they divide the same global batch among themselves, and take the next step

So a step that was under way when a rank was lost is taken again, with the same samples. The run is that of one process
all the while, up to the order of sums; random numbers of dropout begin anew with each generation.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.comm.collectives import all_gather_objects
from lockstep.config import Config, check_ranges
from lockstep.data import DataSet, build_data
from lockstep.errors import UserError
from lockstep.launch.membership import Membership
from lockstep.launch.regroup import Regroup
from lockstep.layout.world import World
from lockstep.strategies.hand_over import check_can_be_handed_over, check_keeps_going, hand_over
from lockstep.training.loop import Begin, Run, chosen_folder, train_with
from lockstep.training.prepare import check_same_data, load_data
from lockstep.training.result import TrainResult
from lockstep.training.run_folder import locked
from lockstep.training.saving import Best
from lockstep.training.stopping import noting
from lockstep.words import counted


@dataclass
class Carried:
    """What this process has of the run."""

    config: Config
    folder: Path | None = None
    dataset: DataSet | None = None
    run: Run | None = None
    """Of the last generation that it was in."""
    signals: list[str] = field(default_factory=list)
    """That have asked this process to stop."""


def train_keeping_going(membership: Membership, config: Config, run_dir: str | None, resume: str | None) -> TrainResult:
    """As `train_in_folder`, on whichever ranks there are."""
    check_ranges(config)
    check_keeps_going(config)
    carried = Carried(config)
    with noting(carried.signals):
        return in_generations(membership, carried, run_dir, resume)


def in_generations(membership: Membership, carried: Carried, run_dir: str | None, resume: str | None) -> TrainResult:
    if membership.came_late:
        carried.dataset = build_data(carried.config, World().device)  # no rank waits for it
    membership.is_ready()
    while True:
        try:
            result = take_part(membership, carried, run_dir, resume)
            membership.leave(behind_a_step=True)
            return result
        except UserError:
            raise
        except Regroup:
            assert carried.run is not None
            carried.run.saving.wait()  # while the ranks that write it together are there
            membership.leave(behind_a_step=True)
        except Exception as error:
            if not membership.will_be_over(error):
                raise
            membership.leave()


def take_part(membership: Membership, carried: Carried, run_dir: str | None, resume: str | None) -> TrainResult:
    """In one generation."""
    world = membership.join()
    is_under_way = any(all_gather_objects(carried.run is not None))
    begin = Begin()
    if not is_under_way:
        chosen = chosen_folder(world, carried.config, run_dir, resume)
        carried.folder, begin = chosen.folder, Begin(chosen.source)
    carried.folder = next(filter(None, all_gather_objects(carried.folder)))
    missing = all_gather_objects(carried.dataset is None)
    if all(missing):
        carried.dataset = load_data(world, carried.config)
    elif carried.dataset is None:
        carried.dataset = build_data(carried.config, world.device)
    if not all(missing):
        check_same_data(carried.config, carried.dataset)  # some have made it by themselves

    def take_over(run: Run) -> None:
        if is_under_way:
            go_on_with(run, carried.run)
        else:
            begin.apply(run, carried.folder)
        check_can_be_handed_over(run.strategy, run.dataset)
        carried.run = run
        run.ends_for_others = membership.is_over
        membership.begins(lambda: run.steps_done, run.strategy.request_stop)

    with locked(world, carried.folder):
        how = Begin(take_over=take_over, signals=carried.signals)
        result = train_with(world, carried.config, carried.dataset, carried.folder, not world.is_main, how)
    result.folder = carried.folder
    return result


def go_on_with(run: Run, old: Run | None) -> None:
    """Where the ranks that have taken the most steps are. `old`: of this process's last generation."""
    if old is not None and old.before_step[0] == old.steps_done:  # a step began, and did not end
        for buffer, before in zip(old.strategy.model.buffers(), old.before_step[1], strict=True):
            buffer.copy_(before)
    run.steps_done = run.resumed_at = hand_over(
        None if old is None else old.strategy, run.strategy, 0 if old is None else old.steps_done
    )
    # The launcher puts processes that have the state first.
    known = next(one for one in all_gather_objects(None if old is None else Known.of(old)) if one is not None)
    known.give(run)
    run.after_regrouping = lambda: report(run, known.step_ended)


@dataclass
class Known:
    """What the first rank knows of a run beside the state, for all ranks."""

    best: Best
    saved_at: int
    save_is_due: bool
    evaluated: tuple[int, float, float] | None
    gave_up: bool
    skipped_in_a_row: int
    step_ended: float
    """By the clock of this machine."""

    @classmethod
    def of(cls, run: Run) -> "Known":
        saving = run.saving
        is_cut_short = saving.disk is not None and (saving.disk.saving or saving.disk.failed is not None)
        return cls(
            saving.best,
            -1 if is_cut_short else saving.saved_at,
            saving.due or is_cut_short,
            run.evaluated,
            run.gave_up,
            run.skipped_in_a_row,
            run.step_ended,
        )

    def give(self, run: Run) -> None:
        run.saving.best, run.saving.saved_at, run.saving.due = self.best, self.saved_at, self.save_is_due
        run.evaluated, run.gave_up, run.skipped_in_a_row = self.evaluated, self.gave_up, self.skipped_in_a_row


def report(run: Run, since: float) -> None:
    """Behind the first step of a generation. `since`: when the last step of the one before had been taken."""
    pause = time.perf_counter() - since  # of one machine, whose processes have one clock
    if run.world.is_main:
        run.logger.record("regroup", run.steps_done, {"ranks": run.world.size, "pause_s": round(pause, 3)})
        run.logger.say(f"step {run.steps_done}: {counted(run.world.size, 'rank')}, after a pause of {pause:.2f} s")
