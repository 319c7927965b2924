"""A timetable as a picture: in the terminal, and as SVG or PNG."""

from pathlib import Path

from rich.text import Text

from lockstep.parallel.pipeline.timetable import Span, Timetable
from lockstep.results.chart import Chart
from lockstep.results.chart import draw as draw_charts

COLOURS = {  # kind -> (terminal, picture)
    "forward": ("white on blue", "#4c78a8"),
    "backward": ("black on green", "#54a24b"),
    "backward_input": ("black on green", "#54a24b"),
    "backward_weight": ("black on yellow", "#eeca3b"),
}
LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}
"""What stands for the colours where there are none."""
WORDS = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, inputs",
    "backward_weight": "backward, weights",
}
LATER_CHUNK = {"white on blue": "white on dark_blue", "black on green": "white on dark_green"}
WIDEST = 400
"""Columns; beyond that a drawing is scaled down."""


def columns_per_unit(found: Timetable, width: int) -> float:
    """As wide as it takes to read the numbers, if the terminal has the room."""
    shortest = min((span.end - span.start for spans in found.ranks for span in spans), default=1.0)
    wanted = 3 / shortest
    return wanted if wanted * found.span <= width else width / found.span


def as_text(found: Timetable, width: int, letters: bool = False) -> list[Text]:
    """A line for every stage: passes with their micro-batch, idle time as dots. `letters`: without colours."""
    label = len(f"stage {len(found.ranks) - 1}  ")
    scale = columns_per_unit(found, min(WIDEST, width - label - 1))
    lines = []
    for rank, spans in enumerate(found.ranks):
        line = Text(f"stage {rank}".ljust(label))
        at = 0
        for span in spans:
            start, end = round(span.start * scale), round(span.end * scale)
            line.append("·" * (start - at), "dim")
            line.append(cell(span, end - start, letters), colour(span))
            at = end
        line.append("·" * (round(found.span * scale) - at), "dim")
        lines.append(line)
    return lines


def cell(span: Span, width: int, letters: bool = False) -> str:
    number = str(span.instruction.micro_batch)
    if letters:
        number = LETTERS[span.instruction.kind] + number
    return number.ljust(width) if len(number) < width else number[:width]


def colour(span: Span) -> str:
    chosen = COLOURS[span.instruction.kind][0]
    return LATER_CHUNK.get(chosen, chosen) if span.instruction.chunk else chosen


def legend(found: Timetable, letters: bool = False) -> Text:
    kinds = dict.fromkeys(span.instruction.kind for spans in found.ranks for span in spans)
    text = Text()
    for kind in kinds:
        text.append(f" {LETTERS[kind]} " if letters else "   ", COLOURS[kind][0])
        text.append(f" {WORDS[kind]}   ")
    text.append("···", "dim")
    text.append(" idle")
    if any(span.instruction.chunk for spans in found.ranks for span in spans):
        text.append("; darker: a later chunk")
    return text


def draw(pictures: dict[str, Timetable], file: Path) -> None:
    """Each timetable below the other, all to one width: the time that its step takes."""
    draw_charts([as_chart(title, found) for title, found in pictures.items()], file, width=1000)


def as_chart(title: str, found: Timetable) -> Chart:
    values = [
        {"stage": f"stage {rank}", "start": span.start, "end": span.end, "kind": WORDS[span.instruction.kind]}
        | {
            "chunk": span.instruction.chunk,
            "number": span.instruction.micro_batch,
            "middle": (span.start + span.end) / 2,
        }
        for rank, spans in enumerate(found.ranks)
        for span in spans
    ]
    kinds = list(dict.fromkeys(value["kind"] for value in values))
    colours = [next(COLOURS[kind][1] for kind, words in WORDS.items() if words == name) for name in kinds]
    time = {"type": "quantitative", "scale": {"domain": [0, found.span], "nice": False}, "title": None}
    bars = {
        "mark": {"type": "bar", "height": {"band": 0.9}, "stroke": "white", "strokeWidth": 0.5},
        "encoding": {
            "x": {"field": "start", **time},
            "x2": {"field": "end"},
            "color": {"field": "kind", "scale": {"domain": kinds, "range": colours}},
            "opacity": {"condition": {"test": "datum.chunk > 0", "value": 0.65}, "value": 1},
        },
    }
    numbers = {
        "transform": [{"filter": f"datum.end - datum.start > {found.span / 140:.9g}"}],
        "mark": {"type": "text", "fontSize": 9},
        "encoding": {"x": {"field": "middle", **time}, "text": {"field": "number"}},
    }
    stages = [f"stage {rank}" for rank in range(len(found.ranks))]
    y = {"field": "stage", "type": "nominal", "sort": stages, "title": None, "scale": {"domain": stages}}
    spec = {"data": {"values": values}, "height": {"step": 26}, "encoding": {"y": y}, "layer": [bars, numbers]}
    return Chart(f"{title}: idle {100 * found.bubble:.1f}% of the step", spec)
