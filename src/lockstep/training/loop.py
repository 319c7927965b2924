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
from lockstep.comm.ledger import Ledger, Mark, mark
from lockstep.config import Config, check_ranges, save_config
from lockstep.config.own import imported
from lockstep.data import Batch, DataSet, Reader
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.measure.peak import peak_flops, slow_bf16
from lockstep.results.record import Record
from lockstep.strategies import ParallelModel, StepResult, strategy_name
from lockstep.strategies.nonfinite import locate_nonfinite
from lockstep.strategies.pipeline import micro_batches_of
from lockstep.strategies.step import Phases
from lockstep.training.evaluate import EVALUATION_BATCH, evaluate
from lockstep.training.metrics import MetricsWriter, step_breakdown, writing_to
from lockstep.training.optimizer import learning_rate
from lockstep.training.prepare import load_data, prepare_strategy
from lockstep.training.run_folder import CONFIG, choose_folder, locked
from lockstep.training.status import StatusBar
from lockstep.training.stopping import stopping_in_good_order
from lockstep.training.window import Spent, Window, peak_memory
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
    spent: Spent = field(default_factory=Spent)
    rate: str = ""
    """Mean throughput, without evaluation and saving."""
    best: tuple[float, int] | None = None
    """The lowest test loss, and after which step."""
    memory: int = 0
    """Bytes, at most, of this rank."""
    gave_up: bool = False
    """`train.patience` evaluations in a row have found nothing better."""


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
        told = config.train.callbacks if world.is_main else ()
        self.callbacks = [imported(path, "train.callbacks") for path in told]
        self.checkpoints, self.quiet, self.stopped = checkpoints, quiet, False
        found = Console(quiet=quiet)
        self.console = found if found.is_terminal else Console(quiet=quiet, width=160)
        train = config.train
        share, workers = strategy.batch_share(), config.data.workers
        self.reader = Reader(dataset.train, train.batch_size, train.seed, share, workers)
        if self.reader.steps_per_epoch is None and train.steps is None:
            raise UserError(f"{dataset.name} is a stream, in which nobody knows where it ends; give --train.steps")
        self.total_steps = train.steps or train.epochs * (self.reader.steps_per_epoch or 0)
        self.steps_per_epoch = self.reader.steps_per_epoch or self.total_steps
        self.steps_done = self.resumed_at = 0
        self.skipped_in_a_row = 0
        self.unseen: deque[Issued] = deque()
        """Steps that have been issued and not been looked at."""
        self.ahead = steps_ahead(world.device) if strategy.loss_scale is None else 0  # fp16's host waits in any case
        """How many there may be."""
        self.status = ""
        self.bar = StatusBar(self.total_steps, -(-self.total_steps // self.steps_per_epoch), self.console, quiet)
        self.losses: list[float] = []
        self.has_tokens = dataset.spec.kind == "tokens"
        self.peak, self.peak_source = peak_flops(world, config.train.precision) if self.has_tokens else (0.0, "")
        self.window, self.spent = Window(mark(world.device)), Spent()
        self.best: tuple[float, int] | None = None
        self.evaluated: tuple[int, float, float] | None = None
        """The last evaluation: after which step, loss, accuracy."""
        self.without_better = 0
        self.gave_up = False

    def train(self) -> TrainResult:
        self._announce()
        start = time.perf_counter()
        self.window.start = mark(self.world.device)
        epoch = self.steps_done // self.steps_per_epoch
        with self.bar:
            while not self._is_over():
                self._train_epoch(epoch)
                epoch += 1
                every = 0 if self.config.train.evaluate_steps else self.config.train.evaluate_every
                if every and epoch % every == 0 and self.steps_done < self.total_steps and not self.gave_up:
                    self._look()
                    if not self.stopped:
                        self._evaluate(epoch)
            self._look()
        if self.window.steps:  # since the last line
            self.losses.append(self.window.means()["loss"])
            self._close_window(mark(self.world.device))
        if self.stopped:
            test_loss = test_accuracy = nan
        else:
            self.strategy.finish()
            seen = self.evaluated
            if seen is not None and seen[0] == self.steps_done and self.strategy.is_exact:
                _, test_loss, test_accuracy = seen
            else:
                test_loss, test_accuracy = self._evaluate(epoch)
        not_saved = None
        if self.checkpoints is not None and (self.stopped or self.config.checkpoint.every):
            self._save(wait=True)
            not_saved = self.checkpoints.failed
        recent = self.losses[-10:]
        return TrainResult(
            steps=self.steps_done,
            resumed_at=self.resumed_at,
            loss=sum(recent) / len(recent) if recent else nan,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            seconds=time.perf_counter() - start,
            losses=self.losses,
            is_main=self.world.is_main,
            stopped=self.stopped,
            not_saved=not_saved,
            spent=self.spent,
            rate=self._rate(self.spent.samples_per_second),
            best=self.best,
            memory=peak_memory(self.world.device),
            gave_up=self.gave_up,
        )

    def _is_over(self) -> bool:
        return self.steps_done >= self.total_steps or self.stopped or self.gave_up

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def _course(self) -> dict[str, Any]:
        """What the data's position depends on."""
        train = self.config.train
        return {"batch_size": train.batch_size, "seed": train.seed, "samples": self.reader.samples or 0}

    def _save(self, wait: bool = False) -> None:
        assert self.checkpoints is not None
        start = time.perf_counter()
        self.checkpoints.save(self.strategy, {"step": self.steps_done, **self._course()}, wait)
        self._was_away("saving", start)
        self._tell_problem()

    def _tell_problem(self) -> None:
        if self.checkpoints is not None and self.checkpoints.problem is not None:
            self.console.print(f"[yellow]{escape(self.checkpoints.problem)}[/]; training goes on", soft_wrap=True)
            self._record("checkpoint", self.steps_done, {"problem": self.checkpoints.problem})
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
        size = "a stream" if self.reader.samples is None else f"{self.reader.samples:,} samples"
        self.console.print(
            f"[bold]{config.model.name}[/] ({self.strategy.parameters:,} parameters) on "
            f"[bold]{escape(self.dataset.name)}[/] ({size}), strategy "
            f"[bold]{strategy_name(config.parallel)}[/], {counted(world.size, 'rank')} "
            f"on {world.device.type} ({world.backend}), {config.train.precision}"
        )
        self.console.print(f"{batch_in_words(config, self.strategy)}, {counted(self.total_steps, 'step')}")
        for line in [*slow_bf16(world.device.type, config.train.precision), *makes_no_sense(config, self.strategy)]:
            self.console.print(f"[yellow]{line}[/]", soft_wrap=True)
        if self.has_tokens:
            peak = f"{self.peak / 1e12:.3g} TFLOP/s per rank ({self.peak_source})"
            self.console.print(f"MFU: matrix products of the model, of a peak of {peak}")

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
            result = self.strategy.step(batch)
            end = mark(self.world.device)
            self.steps_done += 1
            phases, ledger = copy(self.strategy.phases), copy(self.strategy.ledger)  # the next step begins new ones
            self.unseen.append(
                Issued(self.steps_done, epoch, samples, batch, lr, data_seconds, result, end, phases, ledger)
            )
            self._look(self.ahead)
            self.bar.show(self.steps_done, epoch + 1, self.status)
            evaluate_steps = self.config.train.evaluate_steps
            if evaluate_steps and self.steps_done % evaluate_steps == 0 and self.steps_done < self.total_steps:
                self._look()
                if not self.stopped:
                    self._evaluate(epoch + 1)
                    self.strategy.model.train()
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
            numbers = step.result.numbers()
            told = {"loss": step.result.loss, "accuracy": step.result.accuracy, "grad_norm": numbers.grad_norm}
            self.window.add(step.samples, told | step_breakdown(step.phases, step.ledger, step.data_seconds))
            if step.number % self.config.train.log_every == 0 or step.number == self.total_steps:
                self._log(step)

    def _log(self, step: Issued) -> None:
        """One record, and one line, of the steps since the last one."""
        means, rate = self.window.means(), self.window.samples_per_second(step.end)
        self.losses.append(means["loss"])
        values: dict[str, Any] = {"epoch": step.epoch + 1, "loss": means["loss"], "lr": step.lr}
        words = [f"loss {means['loss']:.4f}"]
        if self.dataset.spec.kind != "regression":
            values["accuracy"] = means["accuracy"]
            words.append(f"acc {means['accuracy']:.1%}")
        values |= {"grad_norm": means["grad_norm"], "samples_per_s": rate}
        self.status = f"{words[0]}  {self._rate(rate)}"
        words += [f"norm {means['grad_norm']:.3g}", f"lr {step.lr:.2e}", self._rate(rate)]
        if self.has_tokens:
            values["tokens_per_s"] = rate * self.dataset.spec.shape[0]
        if self.peak:
            values["mfu"] = rate * self.strategy.flops_per_sample / (self.world.size * self.peak)
            words.append(f"MFU {values['mfu']:.1%}")
        values |= {name: means[name] for name in means if name.endswith("_ms")}
        values["exposed_share"] = self.window.exposed_share(step.end)
        values["memory_bytes"] = peak_memory(self.world.device)
        words += [f"exposed {values['exposed_share']:.1%}", f"memory {values['memory_bytes'] / 2**30:.2f} GiB"]
        self._record("train", step.number, values)
        self._close_window(step.end)
        if not self.console.is_terminal:
            self.console.print(f"step {step.number:>6}  epoch {step.epoch + 1:>3}  {'  '.join(words)}", soft_wrap=True)

    def _rate(self, samples_per_second: float) -> str:
        if self.has_tokens:
            return f"{samples_per_second * self.dataset.spec.shape[0]:,.0f} tokens/s"
        return f"{samples_per_second:,.0f} samples/s"

    def _was_away(self, what: str, start: float) -> None:
        """Since then nothing was trained."""
        seconds = time.perf_counter() - start
        setattr(self.spent, what, getattr(self.spent, what) + seconds)
        if self.window.steps:
            self.window.away += seconds
        else:
            self.window.start = mark(self.world.device)

    def _close_window(self, end: Mark) -> None:
        if self.window.steps:
            self.spent.add(self.window, end)
        self.window = Window(end)

    def _record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self.metrics.write(kind, step, values)
        for callback in self.callbacks:
            callback(kind, step, dict(values))

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
        self._record("skipped", step.number, {"where": where})
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"loss or gradients were not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row, up to step "
                f"{step.number} ({where}); lower train.lr or set train.clip_norm"
            )

    def _evaluate(self, epoch: int) -> tuple[float, float]:
        """Mean loss and accuracy over the whole test set, each rank computing its share."""
        train = self.config.train
        per_micro_batch = max(1, train.batch_size // train.accumulation)
        fits = per_micro_batch if self.has_tokens else EVALUATION_BATCH  # logits are large
        start = time.perf_counter()
        found = evaluate(self.strategy, self.dataset.test, fits, train.evaluate_batches)
        self._was_away("evaluation", start)
        if found is None:
            self.stopped = True
            return nan, nan
        loss, accuracy = found
        epoch = max(1, epoch)
        values = {"epoch": epoch, "loss": loss}
        words = f"loss {loss:.4f}"
        if self.dataset.spec.kind != "regression":
            values["accuracy"] = accuracy
            words += f", accuracy {accuracy:.2%}"
        self._record("test", self.steps_done, values)
        self.evaluated = self.steps_done, loss, accuracy
        if self.best is None or loss < self.best[0]:
            self.best, self.without_better = (loss, self.steps_done), 0
        else:
            self.without_better += 1
            patience = self.config.train.patience
            last = self.steps_done >= self.total_steps
            self.gave_up = patience is not None and self.without_better >= patience and not last
        self.console.print(f"step {self.steps_done:>6}  epoch {epoch:>3}  test {words}")
        return loss, accuracy


def batch_in_words(config: Config, strategy: ParallelModel) -> str:
    """global batch 512 = 64 per rank x 2 micro-batches x 4 ranks"""
    total, ranks, micro = config.train.batch_size, strategy.layout.batch.size, config.train.accumulation
    if config.parallel.pp > 1:
        micro = micro_batches_of(config.parallel, micro)
    per_rank, left = divmod(total, ranks * micro)
    parts = [f"{per_rank} per rank", *([f"{micro} micro-batches"] if micro > 1 else []), counted(ranks, "rank")]
    if left:
        over = f"{micro} micro-batches of each of " if micro > 1 else ""
        return f"global batch {total} over {over}{counted(ranks, 'rank')}, as evenly as it goes"
    return f"global batch {total} = {' x '.join(parts)}"


def makes_no_sense(config: Config, strategy: ParallelModel) -> list[str]:
    """What nobody wants who asks for it, and what works all the same."""
    layout, batch = strategy.layout, config.train.batch_size
    readers, found = layout.batch.size, []
    if layout.world.size > 1 and layout.norm.size == 1:
        found.append(
            f"note: with parallel.data single each of the {layout.world.size} ranks trains all of it by itself; give "
            f"--parallel.data bucketed, or leave --nproc out"
        )
    if batch < readers:
        found.append(
            f"note: a global batch of {batch} leaves {readers - batch} of {readers} ranks without a sample; raise "
            f"--train.batch-size"
        )
    return found
