"""One look for all tables: aligned, narrow enough for 80 columns, units in the heading; and what goes into files."""

import csv
from io import StringIO
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.results.whole import write_whole

if TYPE_CHECKING:
    from lockstep.results.record import Record

STRATEGY_WIDTH = len("bucketed+powersgd")


def new_table(title: str, left: tuple[str, ...], right: tuple[str, ...], last: tuple[str, ...] = ()) -> Table:
    """Text columns `left`, numbers `right`, then text columns `last`."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in left:
        table.add_column(heading, no_wrap=True, min_width=STRATEGY_WIDTH if heading == "strategy" else 1)
    for heading in right:
        width = max(len(line) for line in heading.splitlines())
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    for heading in last:  # the only ones that may wrap
        table.add_column(heading)
    return table


class Screen(Console):
    """The terminal, or what takes its place."""

    def on_broken_pipe(self) -> None:
        """`| head` has seen enough: main() ends it in good order."""
        raise BrokenPipeError


def console() -> Console:
    """A terminal's own width; 120 columns where the output goes to a file or a pipe."""
    found = Screen()
    return found if found.is_terminal else Screen(width=120)


def write_rows(rows: list[dict[str, Any]], file: Path) -> None:
    """CSV with the columns of all rows."""
    columns = dict.fromkeys(name for row in rows for name in row)
    out = StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(columns)
    for row in rows:
        writer.writerow(_cell(row.get(name)) for name in columns)
    write_whole(file, out.getvalue())


def keep(record: "Record", json: str | None, plot: str | None) -> None:
    """The files that --json and --plot name: the record, and the charts that the report would draw of it."""
    from lockstep.report.sections import section  # torch, for what ran where
    from lockstep.results.chart import draw

    if json is not None:
        record.write(Path(json))
    if plot is not None:
        made = section(record)
        draw(made.charts[: made.pictured], Path(plot))


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, float) and isnan(value)):
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
