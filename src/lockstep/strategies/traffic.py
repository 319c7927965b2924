"""What a rank sends in a step by theory, axis by axis."""

from typing import Any

import torch
from torch import nn

from lockstep.config import Parallel
from lockstep.data import Batch, first_rows
from lockstep.layout import Degrees, Group, Layout
from lockstep.models.loss import LossSum
from lockstep.parallel.pipeline.schedule import Placement
from lockstep.parallel.pipeline.stage import Stage, cut_stage
from lockstep.strategies.context import context_traffic, cut_positions
from lockstep.strategies.engine import Engine
from lockstep.strategies.pipeline import micro_batches_of, placement_for
from lockstep.strategies.table import STRATEGIES, Table, expected_traffic
from lockstep.strategies.tensor import TensorPlan, cut_tensors, tensor_traffic
from lockstep.strategies.theory import ModelSizes, Theory, added


class FirstRank:
    """The first rank of a layout that nobody has made."""

    def __init__(self, degrees: Degrees) -> None:
        self.degrees = degrees

    def group(self, *axes: str) -> Group:
        (axis,) = axes
        return Group(axis, 0, self.degrees.by_axis()[axis])


def traffic_by_axis(
    model: nn.Module,
    layout: Layout | FirstRank,
    parallel: Parallel,
    loss: LossSum,
    batch: Batch,
    accumulation: int = 1,
    table: Table = STRATEGIES,
    compute: torch.dtype | None = None,
) -> dict[str, Theory | None]:
    """`model`: whole, on the meta device; it is cut. `batch`: this rank's share of the global batch."""
    degrees = layout.degrees
    plan = TensorPlan.of(model, degrees.tp, loss)
    pp, tp, cp = (layout.group(axis) for axis in ("pp", "tp", "cp"))
    micro_batches = batch.micro_batches(accumulation if pp.size == 1 else micro_batches_of(parallel, accumulation))
    stage = model
    if pp.size > 1:
        stage = cut_stage(model, placement_for(parallel), pp)
    cut_tensors(stage, plan, tp, parallel)
    cut_positions(stage, cp, parallel.attention)
    ranks = degrees.replicate * degrees.shard * degrees.cp
    found = {"data": expected_traffic(ModelSizes.of(stage, compute, parallel.reduce_dtype), parallel, ranks, table)}
    if pp.size > 1 and parallel.reshard_micro_batches:
        return {"data": None}  # what is gathered and reduced depends on how forwards and backwards follow each other
    if compute is not None and max(pp.size, tp.size, cp.size) > 1:
        return {**found, "pp": None, "cp": None, "tp": None}  # activations are in several dtypes
    inputs = first_rows(batch.inputs)
    positions = inputs.shape[1] // cp.size if cp.size > 1 or inputs.dim() == 2 else 1
    if not inputs.is_floating_point():
        rows = [(len(m), len(m) * positions) for m in micro_batches]
    else:
        rows = [(len(m), len(m)) for m in micro_batches]
    itemsize = next(stage.parameters()).element_size()
    first = pp.rank == 0
    found["tp"] = added(
        tensor_traffic(stage, plan, tp.size, parallel.sequence, tokens, positions, first, layout_pieces(layout, count))
        for count, tokens in rows
    )
    found["cp"] = added(
        context_traffic(stage, cp.size, parallel.attention, count, positions * cp.size, itemsize) for count, _ in rows
    )
    if tp.size > 1 and not has_known_layers(model):
        found["tp"] = None
    if isinstance(stage, Stage):
        width = stage_width(stage)
        elements = sum(tokens for _, tokens in rows) * (width or 0)
        if parallel.sequence:
            elements //= tp.size
        passed = pipeline_traffic(stage, placement_for(parallel), pp.rank, elements, len(rows), itemsize)
        shard = 0 if isinstance(layout, FirstRank) else layout.group("shard", "cp").rank
        tied = tied_traffic(stage, table[parallel.data], shard, degrees.shard * degrees.cp, itemsize)
        found["pp"] = None if width is None else added([passed, tied])
    return {axis: None if axis in parallel.native else theory for axis, theory in found.items()}


def has_known_layers(model: nn.Module) -> bool:
    """Whether the model says what its layers are. With a `tensor_plan()` alone, only its forward shows whether the
    inputs of its first cut layer need a gradient, and so an all-reduce in backward.
    """
    return any(hasattr(model, name) for name in ("shape", "tensor_sizes", "layers"))


def layout_pieces(layout: Layout | FirstRank, rows: int) -> int | None:
    """In how many pieces a batch of so many rows travels with sequence parallelism."""
    if isinstance(layout, FirstRank):
        return None
    return 2 if layout.world.device.type == "cuda" and rows > 1 else 1


def stage_width(stage: Stage) -> int | None:
    """Features of what passes from one stage to the next; None of a user's model, where it may differ."""
    shape: Any = getattr(stage.__dict__["whole"], "shape", None)
    width: int | None = getattr(shape, "d_model", None)
    return width


def pipeline_traffic(
    stage: Stage, placement: Placement, rank: int, elements: int, micro_batches: int, itemsize: int
) -> Theory:
    """Activations to the next part and gradients to the one before, where those are on other ranks. `elements`: of all
    micro-batches, between two parts.
    """
    messages = 0
    for chunk in range(placement.chunks):
        part = placement.part(rank, chunk)
        for neighbour in (part - 1, part + 1):
            messages += 0 <= neighbour < placement.parts and placement.place(neighbour)[0] != rank
    return Theory(messages * micro_batches, float(messages * elements * itemsize))


def tied_traffic(stage: Stage, engine: type[Engine], rank: int, ranks: int, itemsize: int) -> Theory:
    """The gradients of weights that stages share, to each other stage that has them. `ranks` shard one copy."""
    sent, messages, named = 0.0, 0, dict(stage.named_parameters())
    for name, stages in stage.shared.items():
        if name in named and named[name].requires_grad:
            others = len(stages) - 1
            sent += others * engine.tied_elements(tuple(named[name].shape), rank, ranks) * itemsize
            messages += others
    return Theory(messages, sent)
