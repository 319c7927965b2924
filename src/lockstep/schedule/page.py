"""A timetable as an HTML page in which one steps through time. One file, nothing to fetch."""

from html import escape
from pathlib import Path

from lockstep.parallel.pipeline.timetable import Timetable
from lockstep.results.page import assets, framed
from lockstep.results.whole import write_whole
from lockstep.schedule.draw import COLOURS, WORDS


def write_page(title: str, text: str, pictures: dict[str, Timetable], file: Path) -> None:
    data = [
        {
            "title": f"{name}: idle {100 * found.bubble:.1f}% of the step",
            "span": found.span,
            "ranks": [
                [
                    {
                        "kind": span.instruction.kind,
                        "micro_batch": span.instruction.micro_batch,
                        "chunk": span.instruction.chunk,
                        "start": span.start,
                        "end": span.end,
                    }
                    for span in spans
                ]
                for spans in found.ranks
            ],
        }
        for name, found in pictures.items()
    ]
    kinds = dict.fromkeys(p["kind"] for d in data for passes in d["ranks"] for p in passes)  # type: ignore
    key = "".join(f'<span style="background:{COLOURS[kind][1]}"></span>{WORDS[kind]}' for kind in kinds)
    body, script, style = assets("lockstep.schedule")
    body = body.replace("{{text}}", escape(text)).replace("{{key}}", key)
    given = {"drawings": data, "colours": {kind: pair[1] for kind, pair in COLOURS.items()}, "words": WORDS}
    write_whole(file, framed(title, body, given, script, style))
