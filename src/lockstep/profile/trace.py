"""Chrome traces (also Perfetto's): reading what torch.profiler writes, and one file of all ranks on one time base."""

import gzip
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.comm.collectives import all_gather_objects, barrier
from lockstep.layout.group import group_of

Event = dict[str, Any]
COMMUNICATION, WAITING = 1_000_001, 1_000_002  # threads of our own, below the real ones
DRAWN = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_runtime")


@dataclass
class RankTrace:
    """What one rank's profiler saw."""

    rank: int
    base_us: float
    """Microseconds since 1970 at which the trace's clock is 0."""
    events: list[Event] = field(default_factory=list)
    where: str = ""
    """Machine and device."""

    @classmethod
    def of(cls, rank: int, trace: dict[str, Any], where: str = "") -> "RankTrace":
        events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in DRAWN]
        return cls(rank, float(trace.get("baseTimeNanoseconds", 0)) / 1e3, events, where)


def clock_offset_us(rounds: int = 21) -> float:
    """By how much this clock is ahead of rank 0's: all read theirs as they leave a barrier, and the median counts."""
    ahead = []
    for _ in range(rounds):
        barrier()
        everyone = all_gather_objects(time.time() * 1e6)
        ahead.append([moment - everyone[0] for moment in everyone])
    return float(median(row[group_of().rank] for row in ahead))


def collective_events(timeline: dict[str, Any], start_us: float) -> list[Event]:
    """The ledger's collectives of one step as two more rows: in flight, and waited for."""
    events: list[Event] = []
    for entry in timeline["collectives"]:
        subject = f" of {entry['subject']}" if entry["subject"] else ""
        name = f"{entry['operation'].replace('_', '-')}{subject} ({entry['purpose']})"
        args = {"bytes": entry["nbytes"], "purpose": entry["purpose"], "subject": entry["subject"]}
        for thread, begin, end in (
            (COMMUNICATION, entry["issued"], entry["over"]),
            (WAITING, entry["wait_started"], entry["wait_ended"]),
        ):
            if begin is not None and end is not None:
                events.append(_span(name, "communication", thread, start_us + 1e3 * begin, 1e3 * (end - begin), args))
    return events


def _span(name: str, category: str, thread: int, ts: float, duration: float, args: dict[str, Any]) -> Event:
    span = {"ph": "X", "name": name, "cat": category, "tid": thread, "ts": ts, "dur": max(0.0, duration)}
    return {**span, "args": args}


def merged(traces: Iterable[RankTrace]) -> dict[str, Any]:
    """All ranks in one trace: a process each, times since the first event of all."""
    traces = list(traces)
    begin = min((t.base_us + e["ts"] for t in traces for e in t.events), default=0.0)
    events: list[Event] = []
    for trace in traces:
        events.append(_metadata("process_name", trace.rank, 0, {"name": f"rank {trace.rank}"}))
        events.append(_metadata("process_sort_index", trace.rank, 0, {"sort_index": trace.rank}))
        for number, name in ((COMMUNICATION, "communication (in flight)"), (WAITING, "waiting for communication")):
            events.append(_metadata("thread_name", trace.rank, number, {"name": name}))
        for event in trace.events:
            where = f"{event['pid']} " if event.get("cat", "").startswith(("kernel", "gpu")) else ""
            thread = event["tid"]
            events.append(
                {
                    **event,
                    "pid": trace.rank,
                    "tid": f"{where}{thread}" if where else thread,
                    "ts": trace.base_us + event["ts"] - begin,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def write_trace(trace: dict[str, Any], file: Path) -> None:
    """Compressed if the name ends in .gz; Chrome and Perfetto read both."""
    data = json.dumps(trace).encode()
    file.write_bytes(gzip.compress(data, compresslevel=6) if file.suffix == ".gz" else data)


# ---- arithmetic on spans -----------------------------------------------------------------------------------------


def self_times(events: list[Event]) -> dict[str, float]:
    """Microseconds of each operation by name, without the operations that it called. Events of one thread."""
    totals: dict[str, float] = {}
    open_: list[Event] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_ and event["ts"] >= open_[-1]["ts"] + open_[-1]["dur"]:
            open_.pop()
        totals[event["name"]] = totals.get(event["name"], 0.0) + event["dur"]
        if open_:
            totals[open_[-1]["name"]] -= event["dur"]
        open_.append(event)
    return totals
