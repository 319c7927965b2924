"""What a rank sends in a step by the laws of `parallel/*/law.py`, axis by axis, for a model that is cut."""

from typing import Any

import torch
from torch import nn

from lockstep.config import Parallel
from lockstep.data import Batch, first_rows
from lockstep.layout import Degrees, Group, Layout
from lockstep.models.experts import mixtures_in
from lockstep.models.loss import LossSum
from lockstep.parallel.context import law as context
from lockstep.parallel.law import NOTHING, Sent, added, all_gather
from lockstep.parallel.pipeline import law as pipeline
from lockstep.parallel.pipeline.stage import Stage, cut_stage
from lockstep.parallel.tensor import law as tensor
from lockstep.parallel.tensor.parallel_linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from lockstep.parallel.tensor.tensor_parallel import SummedOverPositions
from lockstep.strategies.context import attention_of, cut_positions
from lockstep.strategies.engine import Engine
from lockstep.strategies.experts import beside_tensors, cut_experts, usual_expert_traffic
from lockstep.strategies.model_sizes import ModelSizes
from lockstep.strategies.pipeline import micro_batches_of, placement_for
from lockstep.strategies.table import STRATEGIES, Table, expected_traffic
from lockstep.strategies.tensor import TensorPlan, cut_tensors


class FirstRank:
    """The first rank of a layout without process groups."""

    def __init__(self, degrees: Degrees) -> None:
        self.degrees = degrees

    def group(self, *axes: str) -> Group:
        (axis,) = axes
        return Group(axis, 0, self.degrees.by_axis()[axis])

    def experts(self, ep: int, over_tp: bool) -> tuple[Group, Group, Group]:
        ranks = self.degrees.replicate * self.degrees.shard * self.degrees.cp * (self.degrees.tp if over_tp else 1)
        return Group("ep", 0, ep), Group("replicas of experts", 0, ranks // ep), Group("", 0, ranks)


def traffic_by_axis(
    model: nn.Module,
    layout: Layout | FirstRank,
    parallel: Parallel,
    loss: LossSum,
    batch: Batch,
    accumulation: int = 1,
    table: Table = STRATEGIES,
    compute: torch.dtype | None = None,
) -> dict[str, Sent | None]:
    """`model`: whole, on the meta device; it is cut. `batch`: this rank's share of the global batch. What experts send
    depends on the router: here all are used alike.
    """
    degrees = layout.degrees
    pp, tp, cp = (layout.group(axis) for axis in ("pp", "tp", "cp"))
    micro_batches = batch.micro_batches(accumulation if pp.size == 1 else micro_batches_of(parallel, accumulation))
    counts_experts = any(mixture.needs_load for mixture in mixtures_in(model).values())
    stage, plan = cut_on_meta(model, layout, parallel, loss)
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
    if tp.size > 1 and found["tp"] is not None:
        found["tp"] += added(beside_tensors(stage, parallel, tokens) for _, tokens in rows) or NOTHING
    if len(rows) > 1 and counts_experts:  # a forward pass more
        found |= {axis: None for axis, group in (("tp", tp), ("cp", cp)) if group.size > 1}
    again = int(len(rows) > 1 and counts_experts)
    found["ep"] = added(usual_expert_traffic(stage, parallel, tokens, again, compute) for _, tokens in rows)
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
        passed = pipeline.activations(placement_for(parallel), pp.rank, elements * itemsize, len(rows))
        shard = 0 if isinstance(layout, FirstRank) else layout.group("shard", "cp").rank
        if len(rows) > 1 and counts_experts:
            passed += pipeline.forward_activations(placement_for(parallel), pp.rank, elements * itemsize, len(rows))
        tied = tied_traffic(stage, table[parallel.data], shard, degrees.shard * degrees.cp, itemsize)
        found["pp"] = None if width is None else added([passed, tied])
    return {axis: None if axis in parallel.native else sent for axis, sent in found.items()}


def cut_on_meta(
    model: nn.Module, layout: Layout | FirstRank, parallel: Parallel, loss: LossSum
) -> tuple[nn.Module, TensorPlan]:
    """This rank's part of the model after all model axes have cut it, and how its matrices are cut."""
    pp, tp, cp = (layout.group(axis) for axis in ("pp", "tp", "cp"))
    plan = TensorPlan.of(model, tp.size, loss)
    stage = model if pp.size == 1 else cut_stage(model, placement_for(parallel), pp)
    apart = cut_experts(stage, layout, parallel)
    cut_tensors(stage, plan, tp, parallel, apart)
    cut_positions(stage, cp, parallel.attention)
    return stage, plan


def has_known_layers(model: nn.Module) -> bool:
    """Whether the model describes its layers. With a `tensor_plan()` alone, only its forward shows whether the
    inputs of its first cut layer need a gradient, and so an all-reduce in backward.
    """
    return any(hasattr(model, name) for name in ("shape", "tensor_sizes", "layers"))


def layout_pieces(layout: Layout | FirstRank, rows: int) -> int | None:
    """In how many pieces sequence parallelism sends a batch of so many rows."""
    if isinstance(layout, FirstRank):
        return None
    return 2 if layout.world.device.type == "cuda" and rows > 1 else 1


def stage_width(stage: Stage) -> int | None:
    """Width of the activations between stages; None for a user's model, where it may differ between stages."""
    shape: Any = getattr(stage.__dict__["whole"], "shape", None)
    width: int | None = getattr(shape, "d_model", None)
    return width


def tensor_traffic(
    stage: nn.Module,
    plan: TensorPlan,
    n: int,
    sequence: bool,
    tokens: int,
    positions: int,
    is_first: bool = True,
    pieces: int | None = 1,
) -> Sent | None:
    """What tensor parallelism on n ranks sends for one micro-batch of `tokens`, forward and backward, where `stage` is
    cut already. None where a layer is not trained, and so sends less. `is_first`: the inputs' gradient is not computed.
    `pieces`: parts of the batch that sequence parallelism sends separately (`halves`); None: not known.
    """
    if n == 1:
        return NOTHING
    if not all(p.requires_grad for p in stage.parameters()):
        return None
    plan = plan.here(stage)
    itemsize = next(stage.parameters()).element_size()
    activation, total = tokens * itemsize, NOTHING
    for part in stage.modules():
        match part:
            case ColumnParallelLinear():
                if part.gather_output:
                    total += all_gather(activation * max(part.cut.sizes) * n, n)
                if not is_first:
                    total += tensor.column(activation * part.in_features, n, sequence, part.gathers_again, pieces)
            case RowParallelLinear():
                total += tensor.row(activation * part.out_features, n, sequence, pieces)
            case VocabParallelEmbedding():
                total += tensor.embedding(activation * part.embedding_dim, n, sequence)
            case _:
                continue
        is_first = False
    for part in stage.modules():
        if isinstance(part.forward, SummedOverPositions):
            total += tensor.replicated(sum(p.nbytes for p in part.parameters(recurse=False)), n)
    if sequence:
        for name, kind in plan.kinds.items():
            if kind == "sequence":  # its output is for all samples alike
                embedding = stage.get_submodule(name)
                assert isinstance(embedding, nn.Embedding)
                total += all_gather(positions * embedding.embedding_dim * itemsize, n)
    return total if plan.head is None else total + tensor.cross_entropy(tokens, itemsize, n)


def context_traffic(model: nn.Module, n: int, attention: str, rows: int, positions: int, itemsize: int) -> Sent:
    """What context parallelism on n ranks sends for one micro-batch of `rows` sequences, forward and backward."""
    total = NOTHING
    for part in attention_of(model) if n > 1 else []:
        queries, keys, _ = part.qkv.parts
        own = rows * positions // n * itemsize
        if attention == "ring":
            total += context.ring(2 * keys * own, n)
        else:
            heads = keys // part.shape.head_size
            total += context.ulysses(queries * own, keys * own * (1 if heads % n == 0 else n // heads), n)
    return total


def tied_traffic(stage: Stage, engine: type[Engine], rank: int, ranks: int, itemsize: int) -> Sent:
    """The gradients of weights that stages share, to each other stage that has them. `ranks` shard one copy."""
    total, named = NOTHING, dict(stage.named_parameters())
    for name, stages in stage.shared.items():
        if name in named and named[name].requires_grad:
            elements = engine.tied_elements(tuple(named[name].shape), rank, ranks)
            total += pipeline.tied(elements * itemsize, len(stages))
    return total
