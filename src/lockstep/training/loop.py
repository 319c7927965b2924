"""The training loop behind `lockstep train`: the same lines for every strategy and any number of ranks."""

import time
from collections import deque
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from lockstep.checkpoint.checkpoints import CHECKPOINTS, Checkpoints, check_same_course
from lockstep.checkpoint.manifest import MANIFEST, read_run
from lockstep.comm.ledger import Ledger, Mark, mark, seconds_between
from lockstep.config import GPT, Config, check_ranges, save_config
from lockstep.data import Batch, DataSet, Sampler, read_share
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.measure.peak import peak_flops, slow_bf16
from lockstep.results.record import Record
from lockstep.strategies import ParallelModel, StepResult, strategy_name
from lockstep.strategies.nonfinite import locate_nonfinite
from lockstep.strategies.step import Phases
from lockstep.training.evaluate import EVALUATION_BATCH, evaluate
from lockstep.training.metrics import MetricsWriter, step_breakdown, writing_to
from lockstep.training.optimizer import learning_rate
from lockstep.training.prepare import load_data, prepare_strategy
from lockstep.training.run_folder import CONFIG, choose_folder, locked
from lockstep.training.status import StatusBar
from lockstep.training.stopping import stopping_in_good_order
from lockstep.words import counted

MAX_SKIPPED_IN_A_ROW = 10


@dataclass
class TrainResult:
    """What a run came to."""

    steps: int
    """Reached: those of the runs that this one goes on from included."""
    loss: float
    """Mean over the last logged steps."""
    test_loss: float
    test_accuracy: float
    seconds: float
    losses: list[float] = field(default_factory=list)
    """Of each logged step."""
    is_main: bool = True
    """Whether this is rank 0's result."""
    stopped: bool = False
    """Before the last step, by SIGTERM or Ctrl-C."""
    stopped_by: str = ""
    """The signal's name."""
    not_saved: str | None = None
    """Why the last checkpoint, which the run should leave behind, is not there."""
    folder: Path | None = None
    resumed_at: int = 0
    """The step that it went on from."""


def train(
    world: World,
    config: Config,
    folder: Path | None = None,
    quiet: bool = False,
    resume: Path | None = None,
) -> TrainResult:
    """Train as the config says; rank 0 shows progress and writes metrics and the resolved config to `folder`.

    `resume`: a run's folder, or one checkpoint, to go on from. Nothing is written before that has succeeded.
    """
    check_ranges(config)
    with locked(world, folder) if folder is not None else nullcontext():
        return _train(world, config, folder, quiet, resume)


def train_in_folder(world: World, config: Config, run_dir: str | None, resume: str | None) -> TrainResult:
    """The same, with the folder that the first rank chooses (`run_folder.py`)."""
    chosen = choose_folder(world, config, run_dir, resume)
    if world.is_main:
        for line in chosen.passed_over:
            print(line)
        if resume == "auto" and chosen.source is None:
            print("--resume auto: there is no checkpoint to go on from; this run starts at the beginning")
    result = train(world, config, chosen.folder, resume=chosen.source)
    result.folder = chosen.folder
    return result


def _train(world: World, config: Config, folder: Path | None, quiet: bool, resume: Path | None) -> TrainResult:
    dataset = load_data(world, config)
    strategy = prepare_strategy(world, config, dataset)
    torch.manual_seed(strategy.layout.seed(config.train.seed))
    saving = config.checkpoint
    checkpoints = None
    alone = world.size > 1 and strategy.layout.norm.size == 1  # ranks that do not wait for each other: one saves
    if folder is not None and (world.is_main or not alone):
        savers = World(device=world.device) if alone else world
        given = (savers, folder / CHECKPOINTS, saving.keep_last, saving.asynchronous)
        checkpoints = Checkpoints(*given, parameters=strategy.parameters)
        if saving.every:
            checkpoints.get_ready()
    run = Run(world, config, dataset, strategy, checkpoints, quiet or not world.is_main)
    if resume is not None:
        run.resume(resume)
    if world.is_main and folder is not None:
        with writing_to(folder):
            save_config(config, folder / CONFIG)
            Record("train", {"ranks": world.size}, asdict(config), title=folder.name).write(folder / "run.json")
    with MetricsWriter(folder if world.is_main else None) as metrics, stopping_in_good_order(strategy) as signals:
        run.metrics = metrics
        result = run.train()
        result.stopped_by = (signals or ["SIGTERM"])[0] if result.stopped else ""
        return result


def steps_ahead(device: torch.device) -> int:
    """While we look at what one step gave, a GPU is busy with the next; a CPU has nothing to do meanwhile."""
    return 1 if device.type == "cuda" else 0


@dataclass
class Issued:
    """A step that has been issued, and what is to be told of it when it is over."""

    number: int
    epoch: int
    samples: int
    """Of the global batch."""
    batch: Batch
    lr: float
    data_seconds: float
    result: StepResult
    end: Mark
    phases: Phases
    ledger: Ledger


class Run:
    """One training run, from the first step to the last evaluation."""

    def __init__(
        self,
        world: World,
        config: Config,
        dataset: DataSet,
        strategy: ParallelModel,
        checkpoints: Checkpoints | None,
        quiet: bool,
    ) -> None:
        self.world, self.config, self.dataset, self.strategy = world, config, dataset, strategy
        self.metrics = MetricsWriter(None)
        self.checkpoints, self.quiet, self.stopped = checkpoints, quiet, False
        found = Console(quiet=quiet)
        self.console = found if found.is_terminal else Console(quiet=quiet, width=160)
        self.sampler = Sampler(len(dataset.train), config.train.batch_size, config.train.seed)
        planned = config.train.epochs * self.sampler.steps_per_epoch
        self.total_steps = config.train.steps or planned
        self.steps_done = self.resumed_at = 0
        self.skipped_in_a_row = 0
        self.unseen: deque[Issued] = deque()
        """Steps that have been issued and not been looked at."""
        self.ahead = steps_ahead(world.device) if strategy.loss_scale is None else 0  # fp16's host waits in any case
        """How many there may be."""
        self.status, self.status_step = "", 0
        self.bar = StatusBar(self.total_steps, self.console, quiet)
        self.losses: list[float] = []
        self.is_gpt = isinstance(config.model, GPT)
        self.peak, self.peak_source = peak_flops(world, config.train.precision) if self.is_gpt else (0.0, "")
        self._window_start = mark(world.device)
        self._window_samples = 0

    def train(self) -> TrainResult:
        self._announce()
        start = time.perf_counter()
        epoch = self.steps_done // self.sampler.steps_per_epoch
        with self.bar:
            while self.steps_done < self.total_steps and not self.stopped:
                self._train_epoch(epoch)
                epoch += 1
                every = self.config.train.evaluate_every
                if every and epoch % every == 0 and self.steps_done < self.total_steps:
                    self._look()
                    if not self.stopped:
                        self._evaluate(epoch)
            self._look()
        if self.stopped:
            test_loss = test_accuracy = nan
        else:
            self.strategy.finish()
            test_loss, test_accuracy = self._evaluate(epoch)
        not_saved = None
        if self.checkpoints is not None and (self.stopped or self.config.checkpoint.every):
            self._save(wait=True)
            not_saved = self.checkpoints.failed
        recent = self.losses[-10:]
        return TrainResult(
            steps=self.steps_done,
            resumed_at=self.resumed_at,
            loss=sum(recent) / max(1, len(recent)),
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            seconds=time.perf_counter() - start,
            losses=self.losses,
            is_main=self.world.is_main,
            stopped=self.stopped,
            not_saved=not_saved,
        )

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def _course(self) -> dict[str, Any]:
        """What the data's position depends on."""
        train = self.config.train
        return {"batch_size": train.batch_size, "seed": train.seed, "samples": len(self.dataset.train)}

    def _save(self, wait: bool = False) -> None:
        assert self.checkpoints is not None
        self.checkpoints.save(self.strategy, {"step": self.steps_done, **self._course()}, wait)
        self._tell_problem()

    def _tell_problem(self) -> None:
        if self.checkpoints is not None and self.checkpoints.problem is not None:
            self.console.print(f"[yellow]{escape(self.checkpoints.problem)}[/]; training goes on", soft_wrap=True)
            self.metrics.write("checkpoint", self.steps_done, {"problem": self.checkpoints.problem})
            self.checkpoints.problem = None

    def resume(self, source: Path) -> None:
        """Go on from a run's newest whole checkpoint, or from one checkpoint; every rank must call it."""
        one = source if (source / MANIFEST).exists() else None
        home = source.parent if one is not None else source / CHECKPOINTS
        group = self.checkpoints.group if self.checkpoints is not None else None
        reading = Checkpoints(self.world, home, group=group)
        found, damage = reading.find(one)
        for line in damage:
            self.console.print(f"[yellow]damaged, passed over:[/] {escape(line)}", soft_wrap=True)
        if found is None:
            raise UserError(f"{home} has no whole checkpoint to go on from")
        check_same_course(read_run(found), self._course(), found)
        saved = reading.load(found, self.strategy)
        self.steps_done = self.resumed_at = int(saved["step"])
        ranks = "" if saved["ranks"] == self.world.size else f", saved by {counted(saved['ranks'], 'rank')}"
        self.console.print(f"resumed at step {self.steps_done} from {found}{ranks}", soft_wrap=True)

    def _announce(self) -> None:
        world, config = self.world, self.config
        self.console.print(
            f"[bold]{config.model.name}[/] ({self.strategy.parameters:,} parameters) on "
            f"[bold]{self.dataset.name}[/] ({len(self.dataset.train):,} samples), strategy "
            f"[bold]{strategy_name(config.parallel)}[/], {counted(world.size, 'rank')} "
            f"on {world.device.type} ({world.backend}), "
            f"global batch {config.train.batch_size}, {config.train.precision}"
        )
        for line in slow_bf16(world.device.type, config.train.precision):
            self.console.print(f"[yellow]{line}[/]")
        if self.is_gpt:
            peak = f"{self.peak / 1e12:.3g} TFLOP/s per rank ({self.peak_source})"
            self.console.print(f"MFU: matrix products of the model, of a peak of {peak}")

    def _train_epoch(self, epoch: int) -> None:
        share = self.strategy.batch_share()
        self.strategy.model.train()
        for indices in self.sampler.epoch(epoch, self.steps_done - epoch * self.sampler.steps_per_epoch):
            if self.steps_done >= self.total_steps or self.stopped:
                break
            read_start = time.perf_counter()
            batch = read_share(self.dataset.train, indices, share)
            data_seconds = time.perf_counter() - read_start
            lr = learning_rate(self.config.train, self.steps_done, self.total_steps)
            self.strategy.set_learning_rate(lr)
            result = self.strategy.step(batch)
            end = mark(self.world.device)
            self.steps_done += 1
            phases, ledger = copy(self.strategy.phases), copy(self.strategy.ledger)  # the next step begins new ones
            self.unseen.append(
                Issued(self.steps_done, epoch, len(indices), batch, lr, data_seconds, result, end, phases, ledger)
            )
            self._look(self.ahead)
            self.bar.show(self.steps_done, self.status)
            every = self.config.checkpoint.every
            if every and self.steps_done % every == 0 and self.steps_done < self.total_steps and not self.stopped:
                self._save()
            self._tell_problem()

    def _look(self, leave: int = 0) -> None:
        """At the steps that have been issued, but for the last ones, whose results would have to be waited for."""
        while len(self.unseen) > leave:
            step = self.unseen.popleft()
            self._guard(step)
            self.stopped = self.stopped or step.result.stop
            self._window_samples += step.samples
            if step.number % self.config.train.log_every == 0 or step.number == self.total_steps:
                self.status, self.status_step = self._log(step), step.number

    def _log(self, step: Issued) -> str:
        """Write one record; return its short form for the progress bar. Every rank reads the loss: it is a sum."""
        loss, accuracy = step.result.loss, step.result.accuracy
        self.losses.append(loss)
        # By the device's clock: the host looks at a step later, and not always equally late.
        samples_per_second = self._window_samples / seconds_between(self._window_start, step.end)
        self._window_start, self._window_samples = step.end, 0
        values: dict[str, Any] = {"epoch": step.epoch + 1, "loss": loss, "lr": step.lr}
        words = [f"loss {loss:.4f}"]
        if self.dataset.spec.kind != "regression":
            values["accuracy"] = accuracy
            words.append(f"acc {accuracy:.1%}")
        values |= {"grad_norm": step.result.numbers().grad_norm, "samples_per_s": samples_per_second}
        if self.is_gpt:
            values["tokens_per_s"] = samples_per_second * self.dataset.spec.shape[0]
            values["mfu"] = samples_per_second * self.strategy.flops_per_sample / (self.world.size * self.peak)
            words.append(f"{values['tokens_per_s']:,.0f} tokens/s  MFU {values['mfu']:.1%}")
        else:
            words.append(f"{samples_per_second:,.0f} samples/s")
        breakdown = step_breakdown(step.phases, step.ledger, step.data_seconds)
        values |= breakdown
        words.append(" ".join(f"{name.removesuffix('_ms')} {ms:.1f}" for name, ms in breakdown.items()) + " ms")
        self.metrics.write("train", step.number, values)
        return "  ".join(words)

    def _guard(self, step: Issued) -> None:
        """All ranks have skipped a non-finite step together: say where it came from, and stop when it does not end."""
        if not step.result.skipped:
            self.skipped_in_a_row = 0
            return
        loss_scale = self.strategy.loss_scale
        if self.strategy.engine.scales_loss or (loss_scale is not None and loss_scale.scale >= 1.0):
            return  # fp16's loss scaling overflowed and has been halved: its ordinary way of finding the scale
        self.skipped_in_a_row += 1
        where = locate_nonfinite(self.strategy, step.batch)
        self.console.print(f"[yellow]step {step.number}: not finite, skipped on all ranks[/] ({escape(where)})")
        self.metrics.write("skipped", step.number, {"where": where})
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"loss or gradients were not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row, up to step "
                f"{step.number} ({where}); lower train.lr or set train.clip_norm"
            )

    def _evaluate(self, epoch: int) -> tuple[float, float]:
        """Mean loss and accuracy over the whole test set, each rank computing its share."""
        train = self.config.train
        fits = max(1, train.batch_size // train.accumulation) if self.is_gpt else EVALUATION_BATCH  # logits are large
        found = evaluate(self.strategy, self.dataset.test, fits)
        if found is None:
            self.stopped = True
            return nan, nan
        loss, accuracy = found
        values = {"epoch": epoch, "loss": loss}
        words = f"loss {loss:.4f}"
        if self.dataset.spec.kind != "regression":
            values["accuracy"] = accuracy
            words += f", accuracy {accuracy:.2%}"
        self.metrics.write("test", self.steps_done, values)
        if self.status and not self.console.is_terminal:
            self.console.print(f"epoch {epoch:>3}  step {self.status_step:>6}  train {self.status}")
        self.console.print(f"epoch {epoch:>3}  step {self.steps_done:>6}  test {words}")
        self._window_start, self._window_samples = mark(self.world.device), 0
        return loss, accuracy
