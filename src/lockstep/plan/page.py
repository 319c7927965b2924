"""A plan as one page: all layouts as points, filters, and the one that is clicked, term by term. Nothing is fetched."""

from html import escape
from pathlib import Path
from typing import Any

from lockstep.parallel.pipeline.schedule import placement_of
from lockstep.parallel.pipeline.timetable import Costs, timetable
from lockstep.plan.memory import GIB
from lockstep.plan.pipeline import instructions
from lockstep.plan.search import Answer, ScoredLayout
from lockstep.plan.step import Clock
from lockstep.results.chart import CONFIG, library
from lockstep.results.page import assets, framed
from lockstep.results.whole import write_whole
from lockstep.schedule.draw import as_chart

AXES = ("zero", "dp", "tp", "pp", "cp", "ep", "schedule", "micro_batch", "recompute", "fits")
COLOURS = {
    **dict.fromkeys(("products", "attention", "head", "recompute"), "compute"),
    **dict.fromkeys(("tensor", "context", "experts", "shards", "gradients"), "waiting"),
    **{"moving": "forward", "optimizer": "optimizer", "pipeline": "third", "launch": "fourth", "straggling": "other"},
}
KINDS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer", "activations": "activations"}
MOST_STAGES = 16
"""Pipelines with more have no picture: it could not be read."""


def write_page(answer: Answer, file: Path) -> None:
    question = answer.question
    pictures: dict[str, Any] = {}
    plans = [as_point(number, plan, pictures) for number, plan in enumerate(answer.plans)]
    title = f"{question.network.name} on {question.cluster}"
    text = (
        f"{question.network.parameters / 1e9:.3g}B parameters, global batch {question.global_batch:,} x "
        f"{question.network.context:,}, {question.precision}. The {len(plans):,} fastest of {answer.fitting:,} layouts "
        f"that fit, of {answer.considered:,} that are legal. Click a point to see what it is made of."
    )
    unit = "tokens/s" if question.network.context > 1 else "samples/s"
    data = {"plans": plans, "axes": AXES, "pipelines": pictures, "config": CONFIG, "unit": unit}
    body, script, style = assets("lockstep.plan")
    write_whole(file, framed(title, body.replace("{{text}}", escape(text)), data, script, style, library()))


def as_point(number: int, plan: ScoredLayout, pictures: dict[str, Any]) -> dict[str, Any]:
    times = [
        {"name": name, "value": seconds, "colour": f"var(--{COLOURS[name]})"}
        for name, seconds in plan.time.terms.items()
        if seconds > 0.001 * plan.time.seconds
    ]
    kinds = [
        {"name": kind, "value": size / GIB, "colour": f"var(--{KINDS.get(kind, 'other')})"}
        for kind, size in plan.memory.kinds.items()
        if size > 0.001 * plan.memory.total
    ]
    return {
        "number": number,
        **plan.figures(),
        "times": times,
        "kinds": kinds,
        "pipeline": picture_of(plan, pictures),
    }


def picture_of(plan: ScoredLayout, pictures: dict[str, Any]) -> str | None:
    """The key of the picture of its pipeline, drawn once for layouts whose stages are alike."""
    layout = plan.layout
    if not 1 < layout.pp <= MOST_STAGES:
        return None
    _, forward, backward = Clock(plan.setting).stages
    scale = max(forward) or 1.0
    m = min(layout.micro_batches, 2 * layout.pp)
    shares = [(round(f / scale, 2), round(b / scale, 2)) for f, b in zip(forward, backward, strict=True)]
    key = f"{layout.schedule} {layout.pp} {layout.chunks} {m} {shares}"
    if key not in pictures and len(pictures) < 24:
        placement = placement_of(layout.schedule, layout.pp, layout.chunks)
        costs = [Costs()] * (layout.pp * placement.chunks)
        for rank, (f, b) in enumerate(shares):
            for chunk in range(placement.chunks):
                n = placement.chunks
                costs[placement.part(rank, chunk)] = Costs(f / n, b / 2 / n, b / 2 / n)
        found = timetable(instructions(layout.schedule, layout.pp, m, layout.chunks), placement, costs)
        pictures[key] = as_chart(f"{layout.schedule}, {layout.pp} stages", found).spec
    return key if key in pictures else None
