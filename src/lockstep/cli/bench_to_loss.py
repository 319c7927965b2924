"""`lockstep bench train --preset low-communication`: strategies that train to a loss."""

import os
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from lockstep.bar import Bar
from lockstep.bench.presets import Preset
from lockstep.bench.to_loss import Row, Training, rows_of, train_cases
from lockstep.bench.train import Case
from lockstep.cli.checks import check_before_ranks
from lockstep.cli.tables import console, keep, new_table, write_rows
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.measure.expected import named_config
from lockstep.results.record import Record
from lockstep.words import counted


def bench_to_loss(
    preset: Preset,
    config: Config,
    seeds: int,
    launch: Launch,
    files: tuple[str | None, str | None, str | None],
) -> int:
    """`files`: of --csv, --json and --plot."""
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}, but it must be 1 or more")
    cases = preset.cases(config)
    for case in cases:
        check_before_ranks(named_config(case.config, case.strategy), launch, 2)
    trainings: list[Training] = run_on_ranks(trained, cases, seeds, launch=launch, default_nproc=2)[0]
    if os.environ.get("RANK", "0") != "0":
        return 0
    rows = rows_of(trainings)
    show(rows, config, seeds)
    csv, json, plot = files
    if csv is not None:
        write_rows([asdict(row) for row in rows], Path(csv))
    result = {"rows": [asdict(row) for row in rows], "trainings": [asdict(t) for t in trainings]}
    keep(Record("bench to a loss", result, asdict(config), title="time and traffic to a loss"), json, plot)
    return 0


def trained(world: World, cases: list[Case], seeds: int) -> list[Training]:
    steps = cases[0].config.train.steps or 0
    every = max(1, cases[0].config.parallel.sync_every)
    with Bar(disable=not world.is_main) as bar:
        what = f"{counted(world.size, 'rank')}, {len(cases)} strategies, {counted(seeds, 'seed')}"
        task = bar.add_task(what, total=len(cases) * seeds * steps)
        return train_cases(world, cases, seeds, every, lambda: bar.advance(task))


def show(rows: list[Row], config: Config, seeds: int) -> None:
    table = new_table(
        f"{counted(config.train.steps or 0, 'step')} each, {counted(seeds, 'seed')}; until the test loss of "
        f"{rows[0].label} after its last step, {rows[0].loss:.4f}",
        ("strategy",),
        (
            *("step\nms", "MB sent\n/step", "test loss\nat the end"),
            *("seconds\nto the loss", f"over\n{rows[0].label}", "lowest -\nhighest", "MB sent\nto the loss"),
        ),
    )
    for row in rows:
        over = [value for value in row.over_first if value is not None]
        missed = f" ({len(over)} of {seeds})" if 0 < len(over) < seeds else ""
        table.add_row(
            row.label,
            f"{row.step_ms:.1f}",
            f"{row.megabytes:.3f}",
            f"{row.loss:.4f}",
            _mean(row.seconds, ".1f"),
            _mean(row.over_first, ".3f") + missed,
            f"{min(over):.3f} - {max(over):.3f}" if over else "-",
            _mean(row.megabytes_to_loss, ".1f"),
        )
    console().print(table)
    console().print("-: not reached. Seconds are those of steps; evaluations are not counted.", soft_wrap=True)


def _mean(values: list[float | None], how: str) -> str:
    there = [value for value in values if value is not None]
    return format(mean(there), how) if there else "-"
