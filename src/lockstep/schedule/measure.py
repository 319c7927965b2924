"""A schedule as ranks have carried it out: a GPT of a few blocks per part, on this machine."""

from statistics import median

import torch
from torch import nn

from lockstep.comm.collectives import all_gather_objects, barrier
from lockstep.layout.world import World
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.schedule_clock import Span, Timetable

WIDTH, ROWS, LAYERS = 384, 64, 4
STEPS = 7


def measure(world: World, schedule: str, micro_batches: int, chunks: int) -> Timetable:
    """The step of median length, of a row of equal layers. Every rank returns the same."""
    torch.manual_seed(0)
    parts = world.size * (2 if schedule == "zb-v" else chunks)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    row = nn.Sequential(*(nn.Sequential(*layers) for _ in range(parts)))
    pipe = Pipeline(row.to(world.device), schedule, micro_batches, chunks, cuts=list(range(1, parts)))
    inputs = torch.randn(ROWS * micro_batches, WIDTH, device=world.device)
    found = []
    for _ in range(STEPS):
        barrier()
        pipe.step(inputs, torch.zeros_like(inputs), nn.functional.mse_loss)
        found.append(timetable_of(pipe))
    spans = [table.span for table in found[2:]]
    return found[2 + spans.index(sorted(spans)[len(spans) // 2])] if median(spans) else found[-1]


def timetable_of(pipe: Pipeline) -> Timetable:
    """Of the last step, of all ranks: one machine's ranks have one clock."""
    everyone = all_gather_objects(pipe.spans(), pipe.group)
    begin = min(start for spans in everyone for _, start, _ in spans)
    return Timetable([[Span(i, start - begin, end - begin) for i, start, end in spans] for spans in everyone])
