"""A schedule as ranks have carried it out: a row of equal layers, or a config's own model."""

from collections.abc import Callable

import torch
from torch import nn

from lockstep.comm.collectives import all_gather_objects, barrier
from lockstep.config import Config
from lockstep.data import read_share
from lockstep.layout import Group
from lockstep.layout.world import World
from lockstep.measure.steps import full_batches
from lockstep.parallel.pipeline.pipeline import Pipeline
from lockstep.parallel.pipeline.schedule import Instruction
from lockstep.parallel.pipeline.timetable import Span, Timetable
from lockstep.strategies.pipeline import PipelineWorker
from lockstep.training.prepare import load_head, prepare_strategy

Spans = list[tuple[Instruction, float, float]]

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
    targets = torch.zeros_like(inputs)
    return median_step(lambda: pipe.step(inputs, targets, nn.functional.mse_loss), pipe.spans, pipe.group)


def measure_config(world: World, config: Config) -> Timetable:
    """The same of a config's model, with its data engine, as the first pipeline of its ranks has carried it out."""
    dataset = load_head(world, config)
    strategy = prepare_strategy(world, config, dataset)
    worker = strategy.worker
    assert isinstance(worker, PipelineWorker)
    indices = full_batches(config, dataset)[0]
    batch = read_share(dataset.train, indices, strategy.batch_share())
    found = median_step(lambda: strategy.step(batch), worker.passes.seconds, worker.group)
    first: Timetable = all_gather_objects(found)[0]
    return first


def median_step(step: Callable[[], object], spans: Callable[[], Spans], group: Group) -> Timetable:
    """Of some steps after two that warm up, the one of median length."""
    found = []
    for _ in range(STEPS):
        barrier()
        step()
        found.append(timetable_of(spans(), group))
    return sorted(found[2:], key=lambda table: table.span)[(STEPS - 2) // 2]


def timetable_of(spans: Spans, group: Group) -> Timetable:
    """Of the last step, of all ranks of a pipeline: one machine's ranks have one clock."""
    everyone = all_gather_objects(spans, group)
    begin = min(start for spans in everyone for _, start, _ in spans)
    return Timetable([[Span(i, start - begin, end - begin) for i, start, end in spans] for spans in everyone])
