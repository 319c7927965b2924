"""`lockstep bench train`."""

import csv
import os
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from lockstep.bench.plot import plot_timings
from lockstep.bench.train import Timing, bench_train
from lockstep.cli.arguments import LinkFlag, RunArguments, check_folder, config_from, over_link, parse, sections
from lockstep.cli.tables import console, new_table
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.launch import run_on_ranks
from lockstep.strategies import strategy_names
from lockstep.world import World


@dataclass
class BenchTrainArguments(RunArguments):
    """Time training steps of several strategies, in turns in one run, so that noise hits all alike.

    A config file may come first. The ratio column is the median over the rounds of a strategy's step time over the
    first strategy's in the same round.

    For example:

    lockstep bench train --strategies ddp bucketed flat overlap naive

    lockstep bench train configs/bench_gpt25m.yaml --strategies ddp bucketed --steps 40 --csv gpt.csv

    lockstep bench train configs/bench_mlp16.yaml --strategies ddp@gloo ddp@shm bucketed@shm
    """

    strategies: tuple[str, ...] = ("ddp", "bucketed", "flat", "overlap", "naive")
    """Names, or all; the first is the one that ratios refer to. An @ names the backend: ddp@gloo bucketed@shm."""
    steps: int = 30
    """Timed steps of each strategy."""
    warmup: int = 3
    """Untimed steps before."""
    link: LinkFlag = None
    csv: str | None = None
    """Write one line per strategy to this file."""
    plot: str | None = None
    """Draw step times, split into work and exposed communication, to this file (.png, .svg or .pdf)."""


def main(argv: list[str]) -> int:
    config, rest = config_from(argv)
    arguments = parse(BenchTrainArguments, rest, "bench train", default=BenchTrainArguments(**sections(config)))
    config = arguments.config()
    if arguments.steps < 1 or arguments.warmup < 0:
        raise UserError(f"--steps {arguments.steps} --warmup {arguments.warmup}: at least 1 step and 0 warm-up steps")
    for flag, file in (("--csv", arguments.csv), ("--plot", arguments.plot)):
        check_folder(flag, file)
    names = _names(arguments.strategies)
    if arguments.link is not None:
        return over_link("bench train", arguments.link, argv, arguments.launch)
    work = (config, names, arguments.steps, arguments.warmup)
    timings: list[Timing] = run_on_ranks(_bench, *work, launch=arguments.launch, default_nproc=2)[0]
    if os.environ.get("RANK", "0") == "0":
        print_timings(timings)
        if arguments.csv is not None:
            write_csv(timings, Path(arguments.csv))
        if arguments.plot is not None:
            plot_timings(timings, Path(arguments.plot))
    return 0


def _names(wanted: tuple[str, ...]) -> list[str]:
    """`all` spelt out, each strategy known; the backend after an @ stays."""
    names = []
    for word in wanted:
        strategy, at, backend = word.partition("@")
        names += [f"{name}{at}{backend}" for name in strategy_names([strategy])]
    return list(dict.fromkeys(names))


def _bench(world: World, config: Config, names: list[str], steps: int, warmup: int) -> list[Timing]:
    with Progress(disable=not world.is_main) as progress:
        task = progress.add_task(f"{world.size} ranks, {len(names)} strategies in turns", total=steps + warmup)
        return bench_train(world, config, names, steps, warmup, lambda: progress.advance(task))


def print_timings(timings: list[Timing]) -> None:
    first = timings[0]
    table = new_table(
        f"{first.parameters:,} parameters, global batch {first.batch_size}, {len(first.step_s)} steps each, in turns",
        ("strategy",),
        (
            *("step ms\nmedian", "p10 - p90\nms", f"ratio to\n{first.strategy}", "samples\n/s", "GFLOP/s"),
            *("exposed\ncomm ms", "comm\n%", "calls\n/step", "MB sent\n/step", "peak\nMiB"),
        ),
    )
    for t in timings:
        low, high = t.spread_ms
        table.add_row(
            t.strategy,
            f"{t.median_ms:.2f}",
            f"{low:.1f} - {high:.1f}",
            f"{t.ratio_to(first):.3f}",
            f"{t.samples_per_s:,.0f}",
            f"{t.flops_per_step / t.median_ms / 1e6:.1f}",
            f"{t.exposed_share * t.median_ms:.2f}",
            f"{100 * t.exposed_share:.0f}",
            f"{t.collectives:.1f}",
            f"{t.wire_mb:.2f}",
            f"{t.peak_mib:.1f}",
        )
    console().print(table)


CSV_COLUMNS = [
    *("strategy", "parameters", "batch_size", "step_ms", "p10_ms", "p90_ms", "ratio", "samples_per_s"),
    *("exposed_ms", "exposed_fraction", "collectives", "wire_mb", "peak_mib"),
]


def write_csv(timings: list[Timing], file: Path) -> None:
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(CSV_COLUMNS)
        for t in timings:
            row = [t.strategy, t.parameters, t.batch_size, t.median_ms, *t.spread_ms, t.ratio_to(timings[0])]
            row += [
                t.samples_per_s,
                t.exposed_share * t.median_ms,
                t.exposed_share,
                t.collectives,
                t.wire_mb,
                t.peak_mib,
            ]
            writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in row)
