"""Some steps under torch.profiler on every rank, put together."""

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from lockstep.comm.collectives import all_gather_objects
from lockstep.config import Config, check_ranges
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.measure.profiler import profiler_for, trace_of
from lockstep.measure.steps import synchronize
from lockstep.measure.timeline import timeline
from lockstep.profile.diagnosis import Diagnosis, busy_spans, diagnose
from lockstep.profile.marked import MarkedSteps
from lockstep.profile.regions import named_blocks
from lockstep.profile.trace import RankTrace, clock_offset_us, collective_events, merged, write_trace
from lockstep.training.metrics import writing_to


@dataclass
class Profile:
    """What rank 0 has of a profiled run."""

    diagnoses: list[Diagnosis]
    """Of each rank."""
    timelines: list[dict[str, Any]]
    """The last step of each rank."""
    parameters: int
    events: int
    """In the trace."""


def profile_steps(
    world: World, config: Config, steps: int, warmup: int, trace_file: Path, snapshot: Path | None = None
) -> Profile:
    """Take `steps` profiled steps after `warmup` others; rank 0 writes one trace of all ranks to `trace_file`."""
    check_ranges(config)
    on_gpu = world.device.type == "cuda"
    if snapshot is not None and not on_gpu:
        raise UserError("--memory-snapshot shows a GPU's memory, and these ranks run on the CPU; leave it out")
    marked = MarkedSteps(world, config)
    strategy = marked.strategy
    strategy.ledger.sees_ends = True
    exposed, total, ledger_events = [], [], []
    last: dict[str, Any] = {}
    if snapshot is not None and world.is_main:
        torch.cuda.memory._record_memory_history()
    with named_blocks(strategy.model) as regions:
        marked.warm_up(warmup)
        with profiler_for(world.device) as profiler:
            for index in range(steps):
                batch = marked.read(index)
                synchronize(world)
                began = time.time() * 1e6
                marked.take(batch, regions)
                last = timeline(strategy)
                ledger_events += collective_events(last, began)
                exposed.append(1e3 * strategy.ledger.exposed_seconds())
                total.append(strategy.ledger.busy_seconds())
    if snapshot is not None and world.is_main:
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
    trace = RankTrace.of(world.rank, trace_of(profiler), where=f"{platform.node()} {world.device}")
    pid = trace.events[0]["pid"]
    trace.events += [{**e, "pid": pid, "ts": e["ts"] - trace.base_us} for e in ledger_events]
    trace.base_us -= clock_offset_us() if world.size > 1 and not one_machine() else 0.0  # moves all of them
    traces = all_gather_objects(trace)
    others = None
    if world.ranks_on_device > 1:
        neighbours = [t for t in traces if t.rank != trace.rank and t.where == trace.where]
        others = [span for t in neighbours for span in busy_spans(t.events, t.base_us - trace.base_us)]
    seen = [1e3 * seconds for seconds in total if seconds is not None]
    found = diagnose(trace.events, mean(exposed), on_gpu, others, mean(seen) if len(seen) == steps else None)
    whole = merged(traces) if world.is_main else {"traceEvents": []}
    if world.is_main:
        with writing_to(trace_file.parent):
            write_trace(whole, trace_file)
    return Profile(
        all_gather_objects(found),
        all_gather_objects(last),
        strategy.parameters,
        len(whole["traceEvents"]),
    )


def one_machine() -> bool:
    """Ranks of one machine read one clock."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
