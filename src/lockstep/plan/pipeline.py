"""How long a pipeline's step is: by running its schedule, with the stages as unequal as they are.

A schedule of many micro-batches goes on as it has begun: when the pipeline is full, each further one costs what the
busiest rank takes for it. So a few more than there are stages are run, and the rest is added (within 1% of running all,
with chunks 2%: `tests/test_plan.py`).
"""

from collections.abc import Sequence
from functools import lru_cache

from lockstep.parallel.pipeline.schedule import Instruction, pipeline_schedule, placement_of
from lockstep.parallel.pipeline.timetable import Costs, timetable


@lru_cache(maxsize=256)
def instructions(schedule: str, stages: int, micro_batches: int, chunks: int) -> list[list[Instruction]]:
    return pipeline_schedule(schedule, stages, micro_batches, chunks)


def pipeline_seconds(
    schedule: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    forward: Sequence[float],
    backward: Sequence[float],
    message: float,
) -> float:
    """`forward`, `backward`: of a micro-batch, on each rank; its chunks share them equally, but for what differs."""
    if stages == 1:
        return micro_batches * (forward[0] + backward[0])
    scale = max(f + b for f, b in zip(forward, backward, strict=True)) or 1.0
    relative = tuple(round(one / scale, 3) for one in (*forward, *backward, message))
    run = min(micro_batches, enough(schedule, stages))
    span = _span(schedule, stages, run, chunks, relative)
    slowest = max(relative[rank] + relative[stages + rank] for rank in range(stages))
    return scale * (span + (micro_batches - run) * slowest)


def enough(schedule: str, stages: int) -> int:
    return 2 * stages if schedule in ("interleaved", "zb-v") else stages + 2


@lru_cache(maxsize=4096)
def _span(schedule: str, stages: int, micro_batches: int, chunks: int, relative: tuple[float, ...]) -> float:
    """`relative`: forward of each rank, backward of each, and a message."""
    placement = placement_of(schedule, stages, chunks)
    parts = stages * placement.chunks
    costs = [Costs()] * parts
    for rank in range(stages):
        forward, backward = relative[rank] / placement.chunks, relative[stages + rank] / placement.chunks
        for chunk in range(placement.chunks):
            costs[placement.part(rank, chunk)] = Costs(forward, backward / 2, backward / 2)
    found = timetable(instructions(schedule, stages, micro_batches, chunks), placement, costs, relative[-1])
    return found.span
