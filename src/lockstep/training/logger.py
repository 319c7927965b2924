"""What a run logs: lines for a person, records for programs, means over windows of steps for both."""

import time
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

from rich.console import Console
from rich.markup import escape

from lockstep.comm.ledger import Ledger, Mark, mark
from lockstep.config import Config
from lockstep.config.user_code import imported, shown_name, where_and_what
from lockstep.data import Batch, DataSet
from lockstep.errors import UserError
from lockstep.launch.leftovers import memory_home
from lockstep.layout.world import World
from lockstep.measure.breakdown import step_breakdown
from lockstep.measure.peak import peak_flops, slow_precision
from lockstep.strategies import ParallelModel, StepResult, strategy_name
from lockstep.strategies.compiling import seconds_compiling
from lockstep.strategies.pipeline import micro_batches_of
from lockstep.strategies.step import Phases
from lockstep.training.metrics import MetricsWriter
from lockstep.training.window import Spent, Window, peak_memory
from lockstep.words import counted


@dataclass
class Issued:
    """A step that has been issued, and what is to be logged when it is over."""

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


class ConsoleLogger:
    """To the terminal or a log, to metrics.jsonl and TensorBoard, and to the user's callbacks."""

    def __init__(self, world: World, config: Config, dataset: DataSet, strategy: ParallelModel, quiet: bool) -> None:
        self.world, self.config, self.dataset, self.strategy = world, config, dataset, strategy
        found = Console(quiet=quiet)
        self.console = found if found.is_terminal else Console(quiet=quiet, width=160)
        self.metrics = MetricsWriter(None)
        paths = config.train.callbacks if world.is_main else ()
        self.callbacks = {path: imported(path, "train.callbacks") for path in paths}
        self.has_tokens = dataset.spec.kind == "tokens"
        self.peak, self.peak_source = peak_flops(world, config.train.precision) if self.has_tokens else (0.0, "")
        self.window, self.spent = Window(mark(world.device)), Spent()
        self.compiled_before = seconds_compiling()
        self.losses: list[float] = []
        """Of each logged step."""
        self.last_loss = nan
        """Of the last step."""
        self.status = ""
        """For the bar: of the last window."""

    def announce(self, samples: int | None, steps: int) -> None:
        """What is about to be done. `samples`: None for a stream."""
        world, config = self.world, self.config
        size = "a stream" if samples is None else f"{samples:,} samples"
        self.console.print(
            f"[bold]{escape(shown_name(config.model))}[/] ({self.strategy.parameters:,} parameters) on "
            f"[bold]{escape(self.dataset.name)}[/] ({size}), strategy "
            f"[bold]{strategy_name(config.parallel)}[/], {counted(world.size, 'rank')} "
            f"on {world.device.type} ({world.backend}), {config.train.precision}"
        )
        self.console.print(f"{batch_in_words(config, self.strategy)}, {counted(steps, 'step')}")
        slow = slow_precision(world.device.type, config.train.precision, config.train.compile != "none")
        for line in [*slow, *makes_no_sense(config, self.strategy)]:
            self.warn(line)
        if self.has_tokens and self.strategy.flops_per_sample:
            peak = f"{self.peak / 1e12:.3g} TFLOP/s per rank ({self.peak_source})"
            self.console.print(f"MFU: matrix products of the model, of a peak of {peak}")

    def say(self, line: str) -> None:
        self.console.print(escape(line), soft_wrap=True, highlight=False)

    def warn(self, line: str) -> None:
        self.console.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)

    # ---- steps -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.window.start = mark(self.world.device)

    def add(self, step: Issued) -> dict[str, float]:
        """Returns where its time went."""
        values = {
            "loss": step.result.loss,
            "accuracy": step.result.accuracy,
            "grad_norm": step.result.numbers().grad_norm,
        }
        self.last_loss = values["loss"]
        breakdown = step_breakdown(step.phases, step.ledger, step.data_seconds)
        self.window.add(step.samples, values | breakdown)
        return breakdown

    def log(self, step: Issued) -> None:
        """One record, and one line, of the steps since the last one."""
        means, rate = self.window.means(), self.window.samples_per_second(step.end)
        values: dict[str, Any] = {"epoch": step.epoch + 1, "loss": means["loss"], "lr": step.lr}
        words = [f"loss {means['loss']:.4f}"]
        if not isnan(means["accuracy"]):
            values["accuracy"] = means["accuracy"]
            words.append(f"acc {means['accuracy']:.1%}")
        values |= {"grad_norm": means["grad_norm"], "samples_per_s": rate}
        self.status = f"{words[0]}  {self.rate(rate)}"
        words += [f"norm {means['grad_norm']:.3g}", f"lr {step.lr:.2e}", self.rate(rate)]
        if self.has_tokens:
            values["tokens_per_s"] = rate * self.dataset.spec.shape[0]
        if self.peak and self.strategy.flops_per_sample:  # else they are not known
            values["mfu"] = rate * self.strategy.flops_per_sample / (self.world.size * self.peak)
            words.append(f"MFU {values['mfu']:.1%}" if values["mfu"] >= 0.001 else f"MFU {100 * values['mfu']:.1g}%")
        values |= {name: means[name] for name in means if name.endswith("_ms")}
        values["exposed_share"] = self.window.exposed_share(step.end)
        values["memory_bytes"] = peak_memory(self.world.device)
        words += [f"exposed {values['exposed_share']:.1%}", f"memory {values['memory_bytes'] / 2**30:.2f} GiB"]
        use = self.strategy.expert_use()
        if use is not None:
            values |= {"auxiliary_loss": use.auxiliary_loss, "busiest_expert": use.busiest}
            values |= {"unused_experts": use.unused, "dropped_share": use.dropped_share}
            words.append(f"busiest expert {use.busiest:.2f} x")
            words += [f"dropped {use.dropped_share:.1%}"] if use.dropped else []
        self.record("train", step.number, values)
        if use is not None:
            self.record("experts", step.number, {"load": use.load, "dropped": use.dropped})
        self.close_window(step.end)
        if not self.console.is_terminal:
            self.say(f"step {step.number:>6}  epoch {step.epoch + 1:>3}  {'  '.join(words)}")

    def tested(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        values = {"epoch": epoch, "loss": loss}
        words = f"loss {loss:.4f}"
        if not isnan(accuracy):
            values["accuracy"] = accuracy
            words += f", accuracy {accuracy:.2%}"
        self.record("test", step, values)
        self.say(f"step {step:>6}  epoch {epoch:>3}  test {words}")

    def rate(self, samples_per_second: float) -> str:
        if self.has_tokens:
            return f"{samples_per_second * self.dataset.spec.shape[0]:,.0f} tokens/s"
        return f"{samples_per_second:,.0f} samples/s"

    def was_away(self, what: str, start: float) -> None:
        """Since then nothing was trained."""
        seconds = time.perf_counter() - start
        setattr(self.spent, what, getattr(self.spent, what) + seconds)
        if self.window.steps:
            self.window.away += seconds
        else:
            self.start()

    def close_window(self, end: Mark) -> None:
        if self.window.steps:
            self.losses.append(self.window.means()["loss"])
            self.spent.add(self.window, end)
            self.spent.compiling = seconds_compiling() - self.compiled_before
        self.window = Window(end)

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self.metrics.write(kind, step, values)
        for path, callback in self.callbacks.items():
            try:
                callback(kind, step, dict(values))
            except Exception as error:  # the user's own code
                raise UserError(f"train.callbacks {path}: {where_and_what(error)}") from error


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
    """Combinations that work, and are probably a mistake."""
    layout, batch = strategy.layout, config.train.batch_size
    readers, found = layout.batch.size, []
    if layout.world.size > 1 and layout.norm.size == 1:
        found.append(
            f"note: with parallel.data single each of the {layout.world.size} ranks trains all of it by itself; give "
            f"--parallel.data bucketed, or leave --nproc out"
        )
    if config.checkpoint.in_memory and memory_home() is None:
        found.append("note: nothing would use the copies of checkpoint.in_memory; give --max-restarts too")
    if batch < readers:
        found.append(
            f"note: a global batch of {batch} leaves {readers - batch} of {readers} ranks without a sample; raise "
            f"--train.batch-size"
        )
    return found
