"""`lockstep schedule`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.cli.arguments import RunArguments
from lockstep.cli.checks import check_before_ranks
from lockstep.cli.flags import config_from, sections
from lockstep.cli.parsing import check_output, parse
from lockstep.cli.tables import console
from lockstep.config.shipped import is_config
from lockstep.errors import UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.parallel.pipeline.schedule import SCHEDULES, pipeline_schedule, placement_of
from lockstep.parallel.pipeline.timetable import Costs, Timetable, most_held, timetable
from lockstep.schedule.draw import as_text, draw, legend
from lockstep.schedule.measure import measure, measure_config
from lockstep.schedule.page import write_page
from lockstep.strategies.pipeline import micro_batches_of


@dataclass
class ScheduleArguments:
    """Draw a pipeline schedule: lockstep schedule NAME, one of naive, gpipe, 1f1b, interleaved, zb-h1, zb-v; or that of
    a config, with what its own model measures in it: lockstep schedule CONFIG.

    For example:

    lockstep schedule 1f1b --stages 4 --micro-batches 8

    lockstep schedule interleaved --stages 4 --micro-batches 8 --chunks 2 --out interleaved.svg

    lockstep schedule zb-h1 --stages 2 --run --out zb.html

    lockstep schedule configs/gpt_pp.yaml --parallel.schedule zb-h1 --run
    """

    stages: int = 4
    """Ranks of the pipeline."""
    micro_batches: int = 8
    chunks: int = 1
    """Parts of the model per stage: interleaved has 2 or more (with 1 it is 1f1b), zb-v always 2."""
    forward: float = 1.0
    """What a micro-batch's forward costs, of all parts of a stage together."""
    backward: float = 2.0
    """And its backward; of zb-h1 and zb-v half of it is the weights' pass."""
    out: str | None = None
    """Also draw it to this file: .svg, .png, .pdf, or .html, a page in which one steps through time."""
    run: bool = False
    """Also carry it out on this machine's ranks, and show what was measured beside it."""
    launch: Annotated[Launch, tyro.conf.arg(name="")] = field(default_factory=Launch)


@dataclass
class ConfigScheduleArguments(RunArguments):
    """Draw the pipeline schedule of a config: lockstep schedule CONFIG.

    For example:

    lockstep schedule configs/gpt_pp.yaml --parallel.schedule zb-h1 --parallel.pp 4 --run --out step.html
    """

    forward: float = 1.0
    """What a micro-batch's forward costs, of all parts of a stage together."""
    backward: float = 2.0
    """And its backward; of zb-h1 and zb-v half of it is the weights' pass."""
    out: str | None = None
    """Also draw it to this file: .svg, .png, .pdf, or .html, a page in which one steps through time."""
    run: bool = False
    """Also take steps of the config on ranks of this machine, and show the median one beside it."""


def main(argv: list[str]) -> int:
    name = argv[0] if argv and not argv[0].startswith("-") else None
    if name is not None and name not in SCHEDULES and is_config(name):
        return of_config(argv)
    arguments = parse(ScheduleArguments, argv[1:] if name is not None else argv, "schedule NAME")
    if name is None:
        raise UserError(f"lockstep schedule needs a name: one of {', '.join(SCHEDULES)}")
    stages, count, launch = arguments.stages, arguments.micro_batches, arguments.launch
    check_drawable(stages, count, arguments.chunks)
    launch.nproc = stages
    run = partial(run_on_ranks, measure, name, count, arguments.chunks, launch=launch)
    compare(arguments, name, stages, count, arguments.chunks, run)
    return 0


MOST_PASSES = 100_000


def check_drawable(stages: int, count: int, chunks: int) -> None:
    if stages * count * max(1, chunks) > MOST_PASSES:
        raise UserError(
            f"{stages:,} stages x {count:,} micro-batches x {chunks:,} chunks are more than the {MOST_PASSES:,} passes "
            f"that can be drawn; give fewer"
        )


def of_config(argv: list[str]) -> int:
    config, rest = config_from(argv)
    arguments = parse(
        ConfigScheduleArguments, rest, "schedule CONFIG", default=ConfigScheduleArguments(**sections(config))
    )
    config, parallel, launch = arguments.config(), arguments.parallel, arguments.launch
    if parallel.pp == 1:
        raise UserError(f"{argv[0]} has no pipeline; give --parallel.pp 2")
    if "pp" in parallel.native:
        raise UserError(f"{argv[0]} has parallel.native pp, whose passes torch keeps to itself; leave native out")
    if launch.nproc is None:
        launch.nproc = parallel.pp * parallel.tp * parallel.cp
    check_before_ranks(config, launch, default_nproc=launch.nproc)
    run = partial(run_on_ranks, measure_config, config, launch=launch)
    count = micro_batches_of(parallel, config.train.accumulation)
    check_drawable(parallel.pp, count, parallel.chunks)
    compare(arguments, parallel.schedule, parallel.pp, count, parallel.chunks, run)
    return 0


def compare(
    arguments: ScheduleArguments | ConfigScheduleArguments,
    name: str,
    stages: int,
    count: int,
    chunks: int,
    run: Callable[[], list[Timetable]],
) -> None:
    """What theory says, beside what `run` has measured."""
    if arguments.forward <= 0 or arguments.backward <= 0:
        raise UserError(f"costs are {arguments.forward:g} and {arguments.backward:g}, but they must be above 0")
    if arguments.out is not None:
        check_output("--out", arguments.out)
    parts = 2 if name == "zb-v" else chunks
    lists, placement = pipeline_schedule(name, stages, count, chunks), placement_of(name, stages, parts)
    costs = Costs(arguments.forward, arguments.backward / 2, arguments.backward / 2)
    found = {"by theory": timetable(lists, placement, costs)}
    if arguments.run:
        found["measured"] = run()[0]
    title = f"{name}, {stages} stages, {count} micro-batches" + (f", {parts} chunks" if parts > 1 else "")
    title += f"; by theory a forward takes {arguments.forward:g}, a backward {arguments.backward:g}"
    show(title, found, [most_held(instructions, placement) for instructions in lists])
    if arguments.out is not None:
        write(title, found, Path(arguments.out))


def show(title: str, found: dict[str, Timetable], held: list[float]) -> None:
    out = console()
    letters = out.color_system is None
    out.print(f"[bold]{title}[/]")
    for name, table in found.items():
        out.print()
        for line in as_text(table, out.width, letters):
            out.print(line, soft_wrap=True)
        unit = "" if name == "by theory" else " s"
        out.print(
            f"{name}: a step takes {table.span:.4g}{unit}, of which a stage stands idle {100 * table.bubble:.1f}% "
            f"({', '.join(f'{100 * table.idle(rank) / table.span:.0f}%' for rank in range(len(table.ranks)))})"
        )
    out.print()
    out.print(legend(found["by theory"], letters))
    out.print(f"micro-batches held at most, by stage: {', '.join(f'{most:g}' for most in held)}")


def write(title: str, found: dict[str, Timetable], file: Path) -> None:
    if file.suffix == ".html":
        text = "Stages from top to bottom, time from left to right; the numbers are micro-batches."
        write_page(title, text, found, file)
    else:
        draw({f"{title}, {name}": table for name, table in found.items()}, file)
    print(f"drawn to {file}")
