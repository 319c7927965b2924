"""A timetable as a picture: in the terminal, and as SVG or PNG."""

from pathlib import Path

from rich.text import Text

from lockstep.errors import UserError
from lockstep.parallel.schedule_clock import Span, Timetable

COLOURS = {  # kind -> (terminal, picture)
    "forward": ("white on blue", "#4c78a8"),
    "backward": ("black on green", "#54a24b"),
    "backward_input": ("black on green", "#54a24b"),
    "backward_weight": ("black on yellow", "#eeca3b"),
}
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


def as_text(found: Timetable, width: int) -> list[Text]:
    """A line for every stage: passes with their micro-batch, idle time as dots."""
    label = len(f"stage {len(found.ranks) - 1}  ")
    scale = columns_per_unit(found, min(WIDEST, width - label - 1))
    lines = []
    for rank, spans in enumerate(found.ranks):
        line = Text(f"stage {rank}".ljust(label))
        at = 0
        for span in spans:
            start, end = round(span.start * scale), round(span.end * scale)
            line.append("·" * (start - at), "dim")
            line.append(cell(span, end - start), colour(span))
            at = end
        line.append("·" * (round(found.span * scale) - at), "dim")
        lines.append(line)
    return lines


def cell(span: Span, width: int) -> str:
    number = str(span.instruction.micro_batch)
    return number.ljust(width) if len(number) < width else number[:width]


def colour(span: Span) -> str:
    chosen = COLOURS[span.instruction.kind][0]
    return LATER_CHUNK.get(chosen, chosen) if span.instruction.chunk else chosen


def legend(found: Timetable) -> Text:
    kinds = dict.fromkeys(span.instruction.kind for spans in found.ranks for span in spans)
    text = Text()
    for kind in kinds:
        text.append("   ", COLOURS[kind][0])
        text.append(f" {WORDS[kind]}   ")
    text.append("···", "dim")
    text.append(" idle")
    if any(span.instruction.chunk for spans in found.ranks for span in spans):
        text.append("; darker: a later chunk")
    return text


def draw(pictures: dict[str, Timetable], file: Path) -> None:
    """Each timetable below the other, all to one scale of the time that its step takes."""
    from matplotlib.figure import Figure  # slow to import, and needed here only

    if file.suffix not in (".svg", ".png", ".pdf"):
        raise UserError(f"{file} must end in .svg, .png or .pdf")
    ranks = sum(len(found.ranks) for found in pictures.values())
    figure = Figure(figsize=(11, 0.45 * ranks + 1.1 * len(pictures) + 0.4), layout="constrained")
    for axes, (title, found) in zip(figure.subplots(len(pictures), squeeze=False)[:, 0], pictures.items(), strict=True):
        small = found.span / 140
        for rank, spans in enumerate(found.ranks):
            for span in spans:
                length, kind = span.end - span.start, span.instruction.kind
                shade = 0.65 if span.instruction.chunk else 1.0
                axes.barh(
                    rank, length, left=span.start, color=COLOURS[kind][1], alpha=shade, edgecolor="white", linewidth=0.5
                )
                if length > small:
                    number = str(span.instruction.micro_batch)
                    axes.text(span.start + length / 2, rank, number, ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(found.ranks)), [f"stage {rank}" for rank in range(len(found.ranks))])
        axes.invert_yaxis()
        axes.set_xlim(0, found.span)
        axes.set_title(f"{title}: idle {100 * found.bubble:.1f}% of the step", loc="left", fontsize=10)
    figure.savefig(file)
