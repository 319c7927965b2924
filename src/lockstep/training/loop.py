"""The training loop behind `lockstep train`: the same lines for every strategy and any number of ranks."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from pathlib import Path

import torch
from torch import Tensor

from lockstep.comm.collectives import all_gather_objects
from lockstep.comm.ledger import mark
from lockstep.config import Config, check_ranges, save_config
from lockstep.data import DataSet, Reader
from lockstep.errors import RankError, UserError
from lockstep.launch.regroup import Regroup
from lockstep.layout.world import World
from lockstep.results.record import Record
from lockstep.strategies import ParallelModel
from lockstep.strategies.nonfinite import locate_nonfinite
from lockstep.strategies.replicas import differing_replicas
from lockstep.training.attempt import Attempt
from lockstep.training.evaluate import EVALUATION_BATCH, evaluate
from lockstep.training.logger import ConsoleLogger, Issued
from lockstep.training.metrics import MetricsWriter, writing_to
from lockstep.training.optimizer import learning_rate
from lockstep.training.out_of_memory import out_of_memory_in_one_line
from lockstep.training.pace import Pace
from lockstep.training.prepare import frozen_weights, load_data, prepare_strategy
from lockstep.training.result import TrainResult
from lockstep.training.run_folder import CONFIG, RunFolder, choose_folder, locked, write_spec
from lockstep.training.saving import Saving
from lockstep.training.status import StatusBar
from lockstep.training.stopping import stopping_in_good_order
from lockstep.training.window import peak_memory

MAX_SKIPPED_IN_A_ROW = 10


def train(
    world: World,
    config: Config,
    folder: Path | None = None,
    quiet: bool = False,
    resume: Path | None = None,
    ended_in: tuple[int, ...] | None = None,
) -> TrainResult:
    """Train as the config says; rank 0 shows progress and writes metrics and the resolved config to `folder`.

    `resume`: a run's folder, or one checkpoint, to go on from. Nothing is written before that has succeeded.
    `ended_in`: this goes on with an attempt of the same launch, of which these are the steps in which it ended.
    """
    check_ranges(config)
    with locked(world, folder) if folder is not None else nullcontext():
        return train_with(world, config, load_data(world, config), folder, quiet, Begin(resume, ended_in))


def train_in_folder(world: World, config: Config, run_dir: str | None, resume: str | None) -> TrainResult:
    """The same, with the folder that the first rank chooses (`run_folder.py`)."""
    chosen = chosen_folder(world, config, run_dir, resume)
    result = train(world, config, chosen.folder, resume=chosen.source, ended_in=chosen.ended_in)
    result.folder = chosen.folder
    return result


def chosen_folder(world: World, config: Config, run_dir: str | None, resume: str | None) -> RunFolder:
    """Where the run is to be, and what it goes on from; a batch that is counted by rank is counted here."""
    chosen = choose_folder(world, config, run_dir, resume)
    if world.is_main:
        for line in chosen.passed_over:
            print(line)
        if resume == "auto" and chosen.source is None:
            print("--resume auto: there is no checkpoint to go on from; this run starts at the beginning")
    if chosen.batch_size is not None:
        config.train.batch_size = chosen.batch_size
    return chosen


@dataclass
class Begin:
    """How a run begins, where it does not begin with its first step."""

    resume: Path | None = None
    ended_in: tuple[int, ...] | None = None
    take_over: "Callable[[Run], None] | None" = None
    """From ranks that are there already: where some were lost, or have come back."""
    signals: list[str] = field(default_factory=list)
    """That ask this process to stop: those that have come already, and those to come."""

    def apply(self, run: "Run", folder: Path | None) -> None:
        """Every rank calls it."""
        if self.take_over is not None:
            self.take_over(run)
        elif self.ended_in is not None and folder is not None:
            run.steps_done = run.resumed_at = run.saving.go_on(folder)
        elif self.resume is not None:
            run.steps_done = run.resumed_at = run.saving.resume(self.resume)


def train_with(
    world: World, config: Config, dataset: DataSet, folder: Path | None, quiet: bool, begin: Begin
) -> TrainResult:
    """`folder` is this run's alone."""
    strategy = prepare_strategy(world, config, dataset)
    torch.manual_seed(strategy.layout.seed(config.train.seed))
    run = Run(world, config, dataset, strategy, folder, quiet or not world.is_main)
    begin.apply(run, folder)
    ended_in = begin.ended_in
    if world.is_main and folder is not None:
        with writing_to(folder):
            save_config(config, folder / CONFIG)
            write_spec(folder, dataset.spec)
            Record("train", {"ranks": world.size}, asdict(config), title=folder.name).write(folder / "run.json")
    run.attempt = Attempt(world, folder, list(ended_in or ()))
    with (
        MetricsWriter(folder if world.is_main else None, run.steps_done, config, world.restarts) as metrics,
        stopping_in_good_order(strategy, begin.signals),
        run.attempt.noted(),
    ):
        run.logger.metrics = metrics
        if ended_in is not None:
            lost = max(0, ended_in[-1] - 1 - run.steps_done)
            run.logger.record(
                "restart", run.steps_done, {"restarts": world.restarts, "ranks": world.size, "lost": lost}
            )
        with out_of_memory_in_one_line(strategy, config):
            result = run.train()
        result.stopped_by = (begin.signals or ["SIGTERM"])[0] if result.stopped else ""
        run.attempt.end("stopped" if result.stopped else "done")
        run.saving.forget_memory()
        return result


def steps_ahead(device: torch.device) -> int:
    """While we look at what one step gave, a GPU is busy with the next; a CPU has nothing to do meanwhile."""
    return 1 if device.type == "cuda" else 0


class Run:
    """One training run, from the first step to the last evaluation."""

    def __init__(
        self,
        world: World,
        config: Config,
        dataset: DataSet,
        strategy: ParallelModel,
        folder: Path | None,
        quiet: bool,
    ) -> None:
        self.world, self.config, self.dataset, self.strategy = world, config, dataset, strategy
        self.logger = ConsoleLogger(world, config, dataset, strategy, quiet)
        self.stopped = False
        self.ends_for_others: Callable[[], bool] | None = None
        """Where ranks may come back: whether the ranks have stopped to let one in."""
        self.after_regrouping: Callable[[], None] | None = None
        """This goes on with a run whose ranks have changed; called behind its first step, by the first rank."""
        self.step_ended = time.perf_counter()
        self.before_step: tuple[int, list[Tensor]] = (-1, [])
        """How many steps had been taken when the last one began, and copies of the buffers: a step that is not finished
        has changed them.
        """
        self.attempt: Attempt | None = None
        train = config.train
        share, workers = strategy.batch_share(), config.data.workers
        self.reader = Reader(dataset.train, train.batch_size, train.seed, share, workers)
        if self.reader.steps_per_epoch is None and train.steps is None:
            raise UserError(f"{dataset.name} is a stream, whose end is not known; give --train.steps")
        self.total_steps = train.steps or train.epochs * (self.reader.steps_per_epoch or 0)
        self.steps_per_epoch = self.reader.steps_per_epoch or self.total_steps
        self.steps_done = self.resumed_at = 0
        self.skipped_in_a_row = 0
        self.pace = Pace(strategy.layout, train.straggler)
        self.unseen: deque[Issued] = deque()
        """Steps that have been issued and not been looked at."""
        self.ahead = steps_ahead(world.device) if strategy.loss_scale is None else 0  # fp16's host waits in any case
        """How many there may be."""
        epochs = -(-self.total_steps // self.steps_per_epoch)
        self.bar = StatusBar(self.total_steps, epochs, self.logger.console, quiet)
        course = {"batch_size": train.batch_size, "seed": train.seed, "samples": self.reader.samples or 0}
        self.saving = Saving(world, config, folder, strategy, self.logger, course | frozen_weights(config))
        self.evaluated: tuple[int, float, float] | None = None
        """The last evaluation: after which step, loss, accuracy."""
        self.gave_up = False

    def train(self) -> TrainResult:
        if self.after_regrouping is None:
            self.logger.announce(self.reader.samples, self.total_steps)
        start = time.perf_counter()
        self.logger.start()
        epoch = self.steps_done // self.steps_per_epoch
        with self.bar:
            if self.after_regrouping is not None and self.steps_done:
                self._do_what_is_due()  # ranks may have been lost, or have come, before it was done
            while not self._is_over():
                self._train_epoch(epoch)
                epoch += 1
            self._look()
        self.logger.close_window(mark(self.world.device))
        if self.stopped:
            test_loss = test_accuracy = nan
        else:
            self.strategy.finish()
            if self.evaluated is not None and self._was_evaluated and self.strategy.is_exact:
                _, test_loss, test_accuracy = self.evaluated
            else:
                test_loss, test_accuracy = self._evaluate(epoch)
        not_saved = self.saving.finish(self.steps_done, self.stopped)
        logged, best = self.logger.losses, self.saving.best
        return TrainResult(
            steps=self.steps_done,
            total_steps=self.total_steps,
            resumed_at=self.resumed_at,
            loss=logged[-1] if logged else self.logger.last_loss,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            seconds=time.perf_counter() - start,
            losses=logged,
            is_main=self.world.is_main,
            stopped=self.stopped,
            not_saved=not_saved,
            saved_at=self.saving.saved_at,
            spent=self.logger.spent,
            rate=self.logger.rate(self.logger.spent.samples_per_second),
            best=(best.loss, best.step) if isfinite(best.loss) else None,
            memory=peak_memory(self.world.device),
            gave_up=self.gave_up,
        )

    def _is_over(self) -> bool:
        return self.steps_done >= self.total_steps or self.stopped or self.gave_up

    # ---- steps -----------------------------------------------------------------------------------------------

    def _train_epoch(self, epoch: int) -> None:
        self.strategy.model.train()
        batches = self.reader.epoch(epoch, self.steps_done - epoch * self.steps_per_epoch)
        while not self._is_over():
            read_start = time.perf_counter()
            samples, batch = next(batches, (0, None))
            if batch is None:
                break
            data_seconds = time.perf_counter() - read_start
            lr = learning_rate(self.config.train, self.steps_done, self.total_steps)
            self.strategy.set_learning_rate(lr)
            self.saving.watch_the_clock()
            if self.attempt is not None:
                self.attempt.take(self.steps_done + 1)
            if self.ends_for_others is not None:
                self.before_step = self.steps_done, [b.clone() for b in self.strategy.model.buffers()]
            result = self.strategy.step(batch)
            end = mark(self.world.device)
            self.steps_done += 1
            self.step_ended = time.perf_counter()
            phases, ledger = copy(self.strategy.phases), copy(self.strategy.ledger)  # the next step begins new ones
            self.unseen.append(
                Issued(self.steps_done, epoch, samples, batch, lr, data_seconds, result, end, phases, ledger)
            )
            self._look(self.ahead)
            if self.after_regrouping is not None:
                self.after_regrouping()
                self.after_regrouping = None
            self.bar.show(self.steps_done, epoch + 1, self.logger.status)
            self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        """Behind a step: an evaluation, a look at the replicas, a checkpoint."""
        train, steps = self.config.train, self.steps_done
        every = train.evaluate_steps or train.evaluate_every * self.steps_per_epoch
        if every and steps % every == 0 and steps < self.total_steps and not self._was_evaluated:
            self._look()
            if not self.stopped:
                self._evaluate(-(-steps // self.steps_per_epoch))
        self._check_replicas()
        if not self.stopped and steps < self.total_steps and self.saving.saved_at != steps:
            self.saving.after_step(steps)
        self.saving.report_problems(steps)

    @property
    def _was_evaluated(self) -> bool:
        """Behind the last step."""
        return self.evaluated is not None and self.evaluated[0] == self.steps_done

    def _check_replicas(self) -> None:
        """Before anything is saved: a checkpoint must not have what is wrong here."""
        every = self.config.train.check_replicas
        if not every or self.steps_done % every or not self.strategy.is_exact:
            return
        self._look()
        self.strategy.settle()
        found = differing_replicas(self.strategy)
        if found is not None:
            self.logger.record("replicas", self.steps_done, {"differ": found})
            raise RankError(
                f"weights that should be the same differ after step {self.steps_done}: {found}; the memory of that "
                f"machine is to be tested, and the run gone on with from a checkpoint"
            )

    def _look(self, leave: int = 0) -> None:
        """At the steps that have been issued, but for the last ones, whose results would have to be waited for."""
        while len(self.unseen) > leave:
            step = self.unseen.popleft()
            self._guard(step)
            self.saving.heard(step.result)
            breakdown = self.logger.add(step)
            for line in self.pace.add(breakdown):
                self.logger.warn(f"step {step.number}: {line}")
            for rank, phase, times in self.pace.found:
                self.logger.record("straggler", step.number, {"rank": rank, "phase": phase, "times": times})
            if step.number % self.config.train.log_every == 0 or step.number == self.total_steps:
                self.logger.log(step)
            self._stop_if(step.result.stop)

    def _stop_if(self, asked: bool) -> None:
        """All ranks have heard it in the same step; what they read of others, each for itself, they agree on."""
        if asked and self.ends_for_others is not None and any(all_gather_objects(self.ends_for_others())):
            raise Regroup
        self.stopped = self.stopped or asked

    def _guard(self, step: Issued) -> None:
        """All ranks have skipped a non-finite step together: say where it came from, and stop when it does not end."""
        if not step.result.skipped:
            self.skipped_in_a_row = 0
            return
        loss_scale = self.strategy.loss_scale
        if self.strategy.engine.scales_loss or (loss_scale is not None and loss_scale.scale >= 1.0):
            return  # fp16's loss scaling overflowed and has been halved: its ordinary way of finding the scale
        self.skipped_in_a_row += 1
        where = locate_nonfinite(self.strategy, step.batch, step.result.totals.local_loss)
        self.logger.warn(f"step {step.number}: not finite, skipped on all ranks ({where})")
        self.logger.record("skipped", step.number, {"where": where})
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"loss or gradients were not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row, up to step "
                f"{step.number} ({where}); lower train.lr or set train.clip_norm"
            )

    def _evaluate(self, epoch: int) -> tuple[float, float]:
        """Mean loss and accuracy over the whole test set, each rank computing its share."""
        train = self.config.train
        per_micro_batch = max(1, train.batch_size // train.accumulation)
        fits = per_micro_batch if self.logger.has_tokens else EVALUATION_BATCH  # logits are large
        start = time.perf_counter()
        found = evaluate(self.strategy, self.dataset.test, fits, train.evaluate_batches)
        self.logger.was_away("evaluation", start)
        if found is None:
            self._stop_if(True)
            return nan, nan
        loss, accuracy = found
        self.logger.tested(self.steps_done, max(1, epoch), loss, accuracy)
        self.evaluated = self.steps_done, loss, accuracy
        self.saving.evaluated(loss, self.steps_done)
        last = self.steps_done >= self.total_steps
        self.gave_up = train.patience is not None and self.saving.best.since >= train.patience and not last
        return loss, accuracy
