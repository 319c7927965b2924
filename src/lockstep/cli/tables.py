"""One look for all tables: aligned, narrow enough for 80 columns, units in the heading."""

from rich import box
from rich.console import Console
from rich.table import Table

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


def console() -> Console:
    """A terminal's own width; 120 columns where the output goes to a file or a pipe."""
    found = Console()
    return found if found.is_terminal else Console(width=120)
