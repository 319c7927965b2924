"""`lockstep calibrate`."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro

from lockstep.bar import Bar
from lockstep.cli.parsing import check_output, parse, refuse_positional
from lockstep.cli.tables import console, new_table
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.plan.calibrate import Links, Measured, machine_from, measure
from lockstep.plan.machine import HERE, Machine
from lockstep.words import counted, duration


@dataclass
class CalibrateArguments:
    """Measure this machine for the planner: matrix products and attention over shapes, memory, and what goes between
    ranks; by all ranks at once, as training uses it. In a minute or two; `lockstep plan --cluster here` then uses it.

    For example:

    lockstep calibrate                                     # every GPU of this machine, or 2 CPU ranks

    lockstep calibrate --nproc 8 --out my_node.yaml        # lockstep plan ... --cluster 4x8xmy_node.yaml
    """

    launch: Annotated[Launch, tyro.conf.arg(name="")] = field(default_factory=Launch)
    out: str = str(HERE)
    """The machine file to write."""


def main(argv: list[str]) -> int:
    refuse_positional(argv, "calibrate")
    arguments = parse(CalibrateArguments, argv, "calibrate")
    check_output("--out", arguments.out)
    gpus = 0 if arguments.launch.device == "cpu" else torch.cuda.device_count()
    everyone, links, sharing = run_on_ranks(_measure, launch=arguments.launch, default_nproc=gpus or 2)[0]
    if os.environ.get("RANK", "0") == "0":
        machine = machine_from(everyone, links, sharing)
        machine.save(Path(arguments.out))
        show(machine, everyone, links, arguments.out)
    return 0


def _measure(world: World) -> tuple[list[Measured], Links, int]:
    with Bar(disable=not world.is_main, transient=True) as bar:
        task = bar.add_task(counted(world.size, "rank"), total=None)
        everyone, links = measure(world, lambda what: bar.update(task, description=what))
    return everyone, links, world.ranks_on_device


def show(machine: Machine, everyone: list[Measured], links: Links, out: str) -> None:
    screen, first = console(), everyone[0]
    table = new_table(f"{machine.title}, {counted(len(everyone), 'rank')} at once", ("what",), ("time", "rate"), ("",))
    for m, k, n, dtype, seconds in first.products:
        rate = 2 * m * k * n / seconds / 1e12
        table.add_row(f"({m}, {k}) x ({k}, {n}) {dtype}", duration(seconds), f"{rate:.3g} TFLOP/s", "")
    for batch, heads, context, dim, seconds in first.attention:
        rate = 2 * batch * heads * context * context * dim / seconds / 1e12
        shape = f"attention {batch} x {heads} x {context} x {dim}"
        table.add_row(shape, duration(seconds), f"{rate:.3g} TFLOP/s", "causal")
    table.add_row("memory, read and written", "-", f"{first.memory / 1e9:.3g} GB/s", "")
    for (name, nbytes), seconds in links.items():
        table.add_row(f"{name} of {nbytes:,} B", duration(seconds), f"{nbytes / seconds / 1e9:.3g} GB/s", "")
    screen.print(table)
    screen.print(f"{out}: lockstep plan CONFIG --cluster {'here' if out == str(HERE) else out}", highlight=False)
