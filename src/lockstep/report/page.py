"""The page itself: HTML from sections, with its style, its scripts and its data inside, and the same data beside it."""

import csv
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from html import escape
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.report.sections import SPOILED, Section, Table, loss_overlay, section, spoiled
from lockstep.results.chart import Chart, library, on_a_page
from lockstep.results.page import framed
from lockstep.results.record import Record, plain

FACTS = {
    **{"processor": "processor", "cores": "cores", "memory_gib": "memory, GiB", "gpus": "GPUs"},
    **{"gpu_memory_gib": "memory of a GPU, GiB", "system": "system", "python": "Python", "torch": "torch"},
    **{"cuda": "CUDA", "nccl": "NCCL", "source": "git, where it ran"},
}
SHARES = ("share", "MFU", "efficiency", "accuracy")
"""Ends of the headings of columns that are shares of 1."""


def write_report(records: list[Record], file: Path, title: str = "Lockstep report") -> list[Path]:
    """Write `file`, and beside it a folder with every table as CSV and everything as JSON. Returns what was written."""
    sections = [section(record) for record in records]
    folder = file.with_name(f"{file.stem}_files")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        file.write_text(render(sections, title, folder.name), encoding="utf-8", errors="replace")
        return [file, *write_data(sections, folder)]
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); choose another place") from None


def write_data(sections: list[Section], folder: Path) -> list[Path]:
    written = []
    for number, made in enumerate(sections, 1):
        for table in made.tables:
            path = folder / csv_name(number, made, table)
            with path.open("w", newline="", encoding="utf-8", errors="replace") as out:
                writer = csv.writer(out)
                writer.writerow(heading for _, heading in table.columns)
                writer.writerows([row.get(key, "") for key, _ in table.columns] for row in table.rows)
            written.append(path)
    everything = folder / "records.json"
    everything.write_text(json.dumps([plain(asdict(s.record)) for s in sections], indent=1), encoding="utf-8")
    return [*written, everything]


def csv_name(number: int, made: Section, table: Table) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", f"{made.kind} {made.title}".lower()).strip("-")[:50]
    return f"{number:02d}-{words}-{table.name}.csv"


# ---- HTML ----------------------------------------------------------------------------------------------------------


def render(sections: list[Section], title: str, folder: str) -> str:
    """One file: nothing in it is fetched from anywhere."""
    charts: list[Any] = []
    body = [_contents(sections)] if len(sections) > 1 else []
    overlay = loss_overlay(sections)
    if overlay is not None:
        body.append(f'<section><h2>Losses</h2><div class="charts">{_chart(overlay, charts)}</div></section>')
    for number, made in enumerate(sections, 1):
        try:
            body.append(_section(number, made, charts, folder))
        except SPOILED as error:
            raise spoiled(made, error) from None
    script = (files("lockstep.report") / "assets" / "page.js").read_text(encoding="utf-8")
    return framed(title, "\n".join(body), plain(charts), script, library=library())


def _contents(sections: list[Section]) -> str:
    items = (f'<li><a href="#s{n}">{escape(_heading(made))}</a></li>' for n, made in enumerate(sections, 1))
    return f"<nav><ol>{''.join(items)}</ol></nav>"


def _heading(made: Section) -> str:
    return made.kind if made.title == made.kind else f"{made.kind}: {made.title}"


def _section(number: int, made: Section, charts: list[Any], folder: str) -> str:
    parts = [f'<section id="s{number}"><h2>{escape(_heading(made))}</h2>']
    parts += [f"<p>{escape(sentence)}</p>" for sentence in made.sentences]
    parts += [f'<div class="charts">{"".join(_chart(chart, charts) for chart in made.charts)}</div>']
    parts += [_table(table, f"{folder}/{csv_name(number, made, table)}") for table in made.tables]
    return "\n".join([*parts, _provenance(made.record), "</section>"])


def _chart(chart: Chart, charts: list[Any]) -> str:
    """A place that the script draws into."""
    charts.append(on_a_page(chart))
    wide = " wide" if chart.wide else ""
    return (
        f'<figure class="chart{wide}"><figcaption>{escape(chart.title)}</figcaption>'
        f'<div class="drawing" data-chart="{len(charts) - 1}"></div></figure>'
    )


def _table(table: Table, file: str) -> str:
    columns = [(heading, [row.get(key) for row in table.rows]) for key, heading in table.columns]
    head = "".join(_head(heading, values) for heading, values in columns)
    cells = zip(*(_column(values, heading) for heading, values in columns), strict=True)
    lines = [f"<tr>{''.join(row)}</tr>" for row in cells]
    caption = f'{escape(table.caption)} <a class="file" href="{escape(file)}" download>CSV</a>'
    return (
        f'<div class="scroll"><table class="sortable"><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _head(heading: str, values: list[Any]) -> str:
    """It stands over numbers as they do, on the right."""
    side = ' class="number"' if any(map(_is_number, values)) else ""
    return f'<th scope="col"{side}><button type="button">{escape(heading)}</button></th>'


def _column(values: list[Any], heading: str) -> list[str]:
    """Its cells."""
    places = decimals([value for value in values if isinstance(value, int | float) and isfinite(value)])
    show: Callable[[float], str] = readable if places is None else f"{{:,.{places}f}}".format
    if heading.endswith(SHARES):
        show = "{:.1%}".format
    return [_cell(value, show) for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any, show: Callable[[float], str]) -> str:
    """Numbers keep their full value for sorting, and show what a person reads."""
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return '<td class="none">-</td>'
    if not _is_number(value):
        return f"<td>{escape(str(value))}</td>"
    return f'<td class="number" data-value="{value!r}">{escape(show(value))}</td>'


def decimals(numbers: list[float]) -> int | None:
    """How many all numbers of a column show, so that their points stand in one line; None if some lose too much."""
    sizes = [abs(number) for number in numbers if number]
    if not sizes:
        return None
    if all(float(number).is_integer() for number in numbers):
        return 0
    places = next((places for places, limit in enumerate((1000, 100, 10)) if max(sizes) >= limit), 3)
    return places if min(sizes) * 10**places >= 10 else None  # two digits are left


def readable(value: float) -> str:
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1e-3 or abs(value) >= 100 else f"{value:.3f}".rstrip("0").rstrip(".")


def _provenance(record: Record) -> str:
    facts = [(name, record.environment[key]) for key, name in FACTS.items() if key in record.environment]
    rows = [("command", record.command), ("when", record.when), *facts]
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in rows)
    config = escape(json.dumps(record.config, indent=1)) if record.config else ""
    shown = f"<h3>config</h3><pre>{config}</pre>" if config else ""
    return f'<details class="where"><summary>What ran where</summary><dl>{cells}</dl>{shown}</details>'
