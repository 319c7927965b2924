"""The comparison as one HTML file: every tensor by step, as dark as it is off."""

from html import escape
from math import log10
from pathlib import Path

from lockstep.judge.compare import Judgement
from lockstep.judge.verdict import Verdict
from lockstep.results.page import framed
from lockstep.results.whole import write_whole

STYLE = """
table.heat { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.heat th { text-align: left; font-weight: normal; padding: 2px 12px 2px 0; }
.heat td { min-width: 4.5em; text-align: right; padding: 2px 6px; border: 1px solid var(--line); }
"""
DARKEST = 6
"""Powers of ten over the tolerance."""


def write_page(verdict: Verdict, judgement: Judgement, said: str, file: Path) -> None:
    if verdict.verdict != "cannot":  # else the two may be no one model
        judgement.measure_all()
    steps = sorted({step for sizes in judgement.sizes.values() for step in sizes})
    head = "".join(f"<th>step {step}</th>" for step in steps)
    rows = "".join(
        f"<tr><th>{kind} of {escape(name)}</th>{''.join(cell(sizes.get(step)) for step in steps)}</tr>"
        for (kind, name), sizes in sorted(judgement.sizes.items())
    )
    body = (
        f"<pre>{escape(said)}</pre><h2>Every tensor, by step</h2>"
        "<p>The difference, as a multiple of what rounding makes of this tensor: up to 1 it is no difference.</p>"
        f'<table class="heat"><tr><th></th>{head}</tr>{rows}</table>'
    )
    write_whole(file, framed("lockstep judge", body, verdict.to_json(), "", STYLE))


def cell(size: float | None) -> str:
    if size is None:
        return "<td></td>"
    power = min(max(log10(size), 0.0), DARKEST) if size > 1 else 0.0
    share = round(15 + 70 * power / DARKEST) if size > 1 else 0
    background = f"color-mix(in srgb, var(--waiting) {share}%, var(--paper))"
    return f'<td style="background: {background}">{size:.2g}</td>'
