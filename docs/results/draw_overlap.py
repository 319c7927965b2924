"""One step of each trace that `lockstep profile` wrote on GPUs: when each rank's GPU computed, and when NCCL ran.

python docs/results/draw_overlap.py runs/profile_naive runs/profile_bucketed --out overlap.svg
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from lockstep.profile.diagnosis import STEP, is_communication, is_kernel
from lockstep.results.chart import Chart
from lockstep.results.chart import draw as draw_charts

KINDS = {"computation": "var(--compute)", "NCCL": "var(--second)"}
GAP_US = 200.0
"""Kernels that are closer than this are drawn as one."""


def read_step(file: Path) -> tuple[float, float, list[dict[str, Any]]]:
    """Begin and end of rank 0's second step, and all complete events."""
    with gzip.open(file) as content:
        events = [event for event in json.load(content)["traceEvents"] if event.get("ph") == "X" and "cat" in event]
    steps = [e for e in events if e["pid"] == 0 and e["name"] == STEP and e["cat"] == "user_annotation"]
    return steps[1]["ts"], steps[1]["ts"] + steps[1]["dur"], events


def busy(events: list[dict[str, Any]], rank: int, kind: str, begin: float, end: float) -> list[tuple[float, float]]:
    """(start, length) in ms of what the GPU did of that kind for a rank."""
    spans: list[list[float]] = []
    for event in sorted(events, key=lambda e: e["ts"]):
        start, stop = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        is_kind = is_kernel(event) and is_communication(event) == (kind == "NCCL")
        if event["pid"] != rank or not is_kind or start >= stop:
            continue
        if spans and start - spans[-1][1] < GAP_US:
            spans[-1][1] = max(spans[-1][1], stop)
        else:
            spans.append([start, stop])
    return [((start - begin) / 1e3, (stop - start) / 1e3) for start, stop in spans]


def chart(folder: Path) -> Chart:
    begin, end, events = read_step(folder / "trace.json.gz")
    values = [
        {"row": f"rank {rank}, {kind}", "kind": kind, "start": start, "end": start + length}
        for rank in sorted({e["pid"] for e in events if is_kernel(e)})
        for kind in KINDS
        for start, length in busy(events, rank, kind, begin, end)
    ]
    spec = {
        "data": {"values": values},
        "height": {"step": 20},
        "mark": {"type": "bar", "height": {"band": 0.85}},
        "encoding": {
            "y": {"field": "row", "type": "nominal", "title": None, "sort": None},
            "x": {"field": "start", "type": "quantitative", "title": "ms of one step"},
            "x2": {"field": "end"},
            "color": {"field": "kind", "scale": {"domain": list(KINDS), "range": list(KINDS.values())}, "legend": None},
        },
    }
    return Chart(f"{folder.name.removeprefix('profile_')}: {(end - begin) / 1e3:.0f} ms", spec)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="what --run-dir of lockstep profile was")
    parser.add_argument("--out", type=Path, default=Path("overlap.svg"))
    given = parser.parse_args()
    draw_charts([chart(folder) for folder in given.folders], given.out)
