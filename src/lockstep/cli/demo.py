"""`lockstep demo`."""

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.cli.parsing import parse, refuse_positional
from lockstep.cli.tables import console, new_table
from lockstep.demo import DemoRow, demo, demo_config
from lockstep.errors import UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.launch.cores import available_cores
from lockstep.measure.timing import as_rows
from lockstep.report import gather, write_report
from lockstep.results.record import Record
from lockstep.training.metrics import writing_to

RECORD = "demo.json"


@dataclass
class DemoArguments:
    """Train the digits CNN with one process, then with every strategy on 2 ranks, and compare.

    For example:

    lockstep demo --nproc 4 --epochs 3
    """

    launch: Annotated[Launch, tyro.conf.arg(name="")] = field(default_factory=Launch)
    epochs: int = 10
    """Passes over the 1,437 training digits, per strategy."""
    run_dir: str = "runs/demo"
    """Where the results and their report.html go."""


def main(argv: list[str]) -> int:
    refuse_positional(argv, "demo")
    arguments = parse(DemoArguments, argv, "demo")
    if arguments.epochs < 1:
        raise UserError(f"--epochs is {arguments.epochs}, but it must be 1 or more")
    folder = Path(arguments.run_dir)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    rows: list[DemoRow] = run_on_ranks(demo, arguments.epochs, launch=arguments.launch, default_nproc=2)[0]
    if os.environ.get("RANK", "0") == "0":
        print_demo(rows, time.perf_counter() - start)
        write_results(rows, arguments.epochs, folder)
        written = write_report(gather([folder / RECORD]), folder / "report.html", "Lockstep demo")
        console().print(f"\nThe same as a page, with timelines and losses: {written[0]}", soft_wrap=True)
    return 0 if all(row.passed for row in rows if row.equal) else 1


def write_results(rows: list[DemoRow], epochs: int, folder: Path) -> None:
    """Everything that the page shows."""
    timings = [row.timing for row in rows]
    table = [
        {**figures, "accuracy": row.accuracy, "difference": row.difference, "equal": verdict(row)}
        | {"timelines": row.timing.timelines}
        for row, figures in zip(rows, as_rows(timings, []), strict=True)
    ]
    losses = {row.timing.label: row.losses for row in rows}
    result = {"sentences": in_words(rows), "rows": table, "losses": losses}
    with writing_to(folder):
        title = f"the digits CNN, one process and {max(row.ranks for row in rows)} ranks"
        Record("demo", result, asdict(demo_config(epochs)), title=title).write(folder / RECORD)


def verdict(row: DemoRow) -> str:
    """✓ equal to one process, ≈ not, by nature, ✗ not, and it should be."""
    return ("✓" if row.passed else "✗") if row.equal else "≈"


def in_words(rows: list[DemoRow]) -> list[str]:
    equal = [row for row in rows if row.equal]
    failed = [row.timing.label for row in equal if not row.passed]
    others = [row.timing.label for row in rows if not row.equal]
    worst = max(row.difference for row in equal)
    said = [f"✓ {len(equal)} strategies end with the weights of one process (largest difference {worst:.0e})."]
    if failed:
        said = [f"✗ {', '.join(failed)}: not the weights of one process, and they should be."]
    return [*said, f"≈ {', '.join(others)}: not equal by nature (compression, local SGD)."] if others else said


def print_demo(rows: list[DemoRow], seconds: float) -> None:
    screen = console()
    ranks = max(row.ranks for row in rows)
    table = new_table(
        f"the digits CNN in float64, one process and {ranks} ranks",
        ("strategy",),
        ("samples\n/s", "step\nms", "exposed\ncomm %", "calls\n/step", "MB sent\n/step", "peak\nMiB", "test\nacc."),
        ("Δ weights", "equal"),
    )
    for row in rows:
        timing = row.timing
        table.add_row(
            timing.strategy,
            f"{timing.samples_per_s:,.0f}",
            f"{timing.median_ms:.1f}",
            f"{100 * timing.exposed_share:.0f}",
            f"{timing.collectives:.1f}",
            f"{timing.wire_mb:.3f}",
            f"{timing.memory.peak_mib:.1f}",
            f"{row.accuracy:.1%}",
            f"{row.difference:.0e}",
            {"✓": "[green]✓[/]", "✗": "[red]✗[/]", "≈": "≈"}[verdict(row)],
        )
    screen.print(table)
    cores = available_cores()
    screen.print(
        "calls: collectives. peak: tensors held at once by one rank. Δ weights: largest difference of\n"
        "a weight to one process. ✓ equal to 1e-10, ≈ not equal by nature (compression, local SGD).\n"
        f"{seconds:.0f} s in all; {cores} cores, {max(1, cores // ranks)} for each process.\n\n"
        "Try next:\n"
        "  lockstep verify                                    prove it in float64, on 2, 4 and 8 ranks\n"
        "  lockstep bench train                               which is fastest here\n"
        "  lockstep train digits_cnn --nproc 2                98% on the test set\n"
        "  lockstep train gpt_text --nproc 2                  a language model of Python's own sources"
    )
