"""`lockstep bench scaling`."""

import os
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path

import torch

from lockstep.bench.presets import GPT_25M, text
from lockstep.bench.scaling import MODES, Mode, Point, amdahl_fit, points, scaling_cases, sentences
from lockstep.cli.arguments import RunArguments
from lockstep.cli.bench_train import time_cases
from lockstep.cli.flags import config_from, sections
from lockstep.cli.parsing import check_outputs, parse
from lockstep.cli.tables import console, keep, new_table, write_rows
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.launch import adopt_environment, run_on_ranks
from lockstep.launch.cores import available_cores
from lockstep.measure.timing import Timing
from lockstep.results.record import Record
from lockstep.strategies import strategy_name
from lockstep.words import counted


@dataclass
class BenchScalingArguments(RunArguments):
    """Weak and strong scaling over world sizes, in turns in one run: speed-up, efficiency, and what is lost to what.

    A config file may come first; without one it is a GPT of 25M parameters. --parallel.data names the strategy.

    For example:

    lockstep bench scaling --world-size 1 2 4 --plot scaling.png

    lockstep bench scaling configs/digits_cnn.yaml --parallel.data zero3 --modes weak
    """

    world_size: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of ranks; the largest is started."""
    modes: tuple[Mode, ...] = MODES
    """strong: the same global batch for all; weak: the same batch for each rank."""
    threads: int | None = None
    """Cores of each rank, the same at every size. None: OMP_NUM_THREADS if it is set, else what the largest
    size leaves for each, at least 1."""
    steps: int = 8
    """Timed steps of each size and mode."""
    warmup: int = 2
    """Untimed steps before."""
    csv: str | None = None
    """Write one line per size and mode to this file."""
    json: str | None = None
    """Write everything to this file, for `lockstep report`."""
    plot: str | None = None
    """Draw speed-up and efficiency to this file (.png, .svg or .pdf)."""


def main(argv: list[str]) -> int:
    config, rest = config_from(argv, text(replace(GPT_25M, context=16), 8))
    arguments = parse(BenchScalingArguments, rest, "bench scaling", default=BenchScalingArguments(**sections(config)))
    config = arguments.config()
    sizes = tuple(sorted(set(arguments.world_size)))
    if not sizes:
        raise UserError("--world-size has no number behind it; give some, or leave it out")
    if sizes[0] < 1:
        raise UserError(f"--world-size {' '.join(map(str, arguments.world_size))}: give numbers of 1 or more")
    if not arguments.modes or arguments.steps < 1 or arguments.warmup < 0:
        given = f"--modes {' '.join(arguments.modes)} --steps {arguments.steps} --warmup {arguments.warmup}"
        raise UserError(f"{given}: at least one mode, 1 step and 0 warm-up steps")
    if arguments.launch.nproc not in (None, sizes[-1]):
        raise UserError(f"--nproc {arguments.launch.nproc} is not the largest --world-size {sizes[-1]}; leave it out")
    check_sizes(config, sizes)
    check_outputs(arguments.csv, arguments.json, arguments.plot)
    threads = threads_of_each(arguments.threads, sizes[-1])
    ranks = run_on_ranks(
        *(time_cases, scaling_cases(config, arguments.modes, sizes), arguments.steps, arguments.warmup),
        launch=arguments.launch,
        default_nproc=sizes[-1],
        threads=threads,
    )
    if os.environ.get("RANK", "0") == "0":
        timings: list[Timing] = ranks[0]
        on_gpu = timings[0].device == "cuda"
        sharing = max(timing.ranks_on_device for timing in timings)
        cores = max(len(timing.cores) for timing in timings)
        slots = sizes[-1] // sharing if on_gpu else max(1, cores // threads)
        found = points(timings, slots)
        lines = sentences(found, slots, threads, on_gpu)
        print_scaling(found, timings[0], lines)
        if arguments.csv is not None:
            write_rows([p.as_row() for p in found], Path(arguments.csv))
        serial = amdahl_fit([p for p in found if p.mode == "strong" and p.ranks <= slots])
        result = {"points": [p.as_row() for p in found], "sentences": lines, "serial": serial}
        result |= {"slots": slots, "threads": threads}
        title = f"{strategy_name(config.parallel)}, {' and '.join(arguments.modes)}"
        keep(Record("bench scaling", result, asdict(config), title=title), arguments.json, arguments.plot)
    return 0


def threads_of_each(asked: int | None, ranks: int) -> int:
    """Cores of each of so many ranks."""
    if adopt_environment():
        if asked is not None:
            raise UserError(f"--threads {asked}: torchrun or srun started the ranks; set OMP_NUM_THREADS there instead")
        return torch.get_num_threads()
    cores = available_cores()
    if asked is not None and not 1 <= asked <= cores:
        raise UserError(f"--threads {asked}: give 1 to {cores}, the cores of this machine")
    variable = os.environ.get("OMP_NUM_THREADS", "")
    return asked or (int(variable) if variable.isdigit() else max(1, cores // ranks))


def check_sizes(config: Config, sizes: tuple[int, ...]) -> None:
    """Refuse what cannot run on a part of the ranks, or on ranks that are not there."""
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if started and sizes[-1] > started:
        raise UserError(f"--world-size goes up to {sizes[-1]}, and {started} ranks have been started")
    if config.parallel.data == "deepspeed" and len(sizes) > 1:
        raise UserError("deepspeed always takes all ranks: give one --world-size at a time")


def print_scaling(found: list[Point], first: Timing, lines: list[str]) -> None:
    screen = console()
    table = new_table(
        f"{first.strategy}, {first.parameters:,} parameters, {counted(len(first.step_s), 'step')} each, in turns",
        ("mode",),
        (
            *("ranks", "global\nbatch", "step ms\nmedian", "95%\ninterval", "samples\n/s", "speed-up", "effi-\nciency"),
            *("lost to\ncomm. %", "imbal-\nance %"),
            *("shared\nGPUs %" if first.device == "cuda" else "shared\ncores %", "other\n%"),
        ),
    )
    for p in found:
        losses = (p.communication_ms, p.imbalance_ms, p.cores_ms, p.other_ms)
        table.add_row(
            p.mode,
            str(p.ranks),
            str(p.batch_size),
            f"{p.step_ms:.1f}",
            "-" if isnan(p.low95_ms) else f"{p.low95_ms:.1f} - {p.high95_ms:.1f}",  # too few steps for an interval
            f"{p.samples_per_s:,.1f}",
            f"{p.speedup:.2f}",
            f"{p.efficiency:.0%}",
            *(f"{100 * p.share(ms):.0f}" for ms in losses),
        )
    screen.print(table)
    for line in lines:
        screen.print(line, highlight=False, soft_wrap=True)
