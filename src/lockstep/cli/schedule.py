"""`lockstep schedule`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.cli.arguments import check_output, parse
from lockstep.cli.tables import console
from lockstep.errors import UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.parallel.schedule import SCHEDULES, pipeline_schedule, placement_of
from lockstep.parallel.schedule_clock import Costs, Timetable, most_held, timetable
from lockstep.schedule.draw import as_text, draw, legend
from lockstep.schedule.measure import measure
from lockstep.schedule.page import write_page


@dataclass
class ScheduleArguments:
    """Draw a pipeline schedule: lockstep schedule NAME, one of naive, gpipe, 1f1b, interleaved, zb-h1, zb-v.

    For example:

    lockstep schedule 1f1b --stages 4 --micro-batches 8

    lockstep schedule interleaved --stages 4 --micro-batches 8 --chunks 2 --output interleaved.svg

    lockstep schedule zb-h1 --stages 2 --run --output zb.html
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
    output: str | None = None
    """Also draw it to this file: .svg, .png, .pdf, or .html, a page in which one steps through time."""
    run: bool = False
    """Also carry it out on this machine's ranks, and show what was measured beside it."""
    launch: Annotated[Launch, tyro.conf.arg(name="")] = field(default_factory=Launch)


def main(argv: list[str]) -> int:
    name = argv[0] if argv and not argv[0].startswith("-") else None
    arguments = parse(ScheduleArguments, argv[1:] if name is not None else argv, "schedule NAME")
    if name is None:
        raise UserError(f"lockstep schedule needs a name: one of {', '.join(SCHEDULES)}")
    if arguments.forward <= 0 or arguments.backward <= 0:
        raise UserError(f"costs are {arguments.forward:g} and {arguments.backward:g}, but they must be above 0")
    if arguments.output is not None:
        check_output("--output", arguments.output)
    stages, count = arguments.stages, arguments.micro_batches
    chunks = 2 if name == "zb-v" else arguments.chunks
    lists, placement = pipeline_schedule(name, stages, count, arguments.chunks), placement_of(name, stages, chunks)
    costs = Costs(arguments.forward, arguments.backward / 2, arguments.backward / 2)
    found = {"by theory": timetable(lists, placement, costs)}
    title = f"{name}, {stages} stages, {count} micro-batches" + (f", {chunks} chunks" if chunks > 1 else "")
    if arguments.run:
        launch = arguments.launch
        launch.nproc = stages
        found["measured"] = run_on_ranks(measure, name, count, arguments.chunks, launch=launch)[0]
    show(title, found, [most_held(instructions, placement) for instructions in lists])
    if arguments.output is not None:
        write(title, found, Path(arguments.output))
    return 0


def show(title: str, found: dict[str, Timetable], held: list[float]) -> None:
    out = console()
    out.print(f"[bold]{title}[/]")
    for name, table in found.items():
        out.print()
        for line in as_text(table, out.width):
            out.print(line, soft_wrap=True)
        unit = "" if name == "by theory" else " s"
        out.print(
            f"{name}: a step takes {table.span:.4g}{unit}, of which a stage stands idle {100 * table.bubble:.1f}% "
            f"({', '.join(f'{100 * table.idle(rank) / table.span:.0f}%' for rank in range(len(table.ranks)))})"
        )
    out.print()
    out.print(legend(found["by theory"]))
    out.print(f"micro-batches held at most, by stage: {', '.join(f'{most:g}' for most in held)}")


def write(title: str, found: dict[str, Timetable], file: Path) -> None:
    if file.suffix == ".html":
        text = "Stages from top to bottom, time from left to right; the numbers are micro-batches."
        write_page(title, text, found, file)
    else:
        draw({f"{title}, {name}": table for name, table in found.items()}, file)
    print(f"drawn to {file}")
