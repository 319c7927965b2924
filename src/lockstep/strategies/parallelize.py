"""From a plain model on one device to one that is spread over the ranks: one function, in one fixed order.

0. every rank takes the first rank's weights, once
1. cut into stages, tensor parallel, context parallel: the model says how it is cut, and knows nothing of ranks
2. recompute: activation checkpointing, around the blocks' own forward
3. compile: inside the blocks, so that the hooks of what comes next stay outside
4. the data engine: wraps or shards what is there, and makes the optimizer for what is left to train on this rank
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import broadcast
from lockstep.config import Parallel
from lockstep.errors import UserError
from lockstep.layout import Group, Layout, World
from lockstep.models import parameter_count
from lockstep.models.blocks import blocks_of
from lockstep.models.float8 import Float8Linear
from lockstep.models.initial import Deferred
from lockstep.models.matrices import matrices_in
from lockstep.models.recompute import recompute
from lockstep.parallel.data.wrapper import check_same_model, models_are_equal
from lockstep.parallel.optimizer.average import WeightAverage
from lockstep.parallel.optimizer.muon import Muon
from lockstep.parallel.pipeline.stage import Stage
from lockstep.strategies.compiling import compile_blocks, compile_model
from lockstep.strategies.cutting import cut_model
from lockstep.strategies.engine import Engine
from lockstep.strategies.options import Options
from lockstep.strategies.parallel_model import ParallelModel
from lockstep.strategies.table import STRATEGIES, Table, check_parallel, degrees_of


def make_layout(world: World, parallel: Parallel, table: Table = STRATEGIES) -> Layout:
    """What the config asks for, over the ranks that there are."""
    return Layout(world, degrees_of(parallel, world.size, table))


def parallelize(
    model: nn.Module | Deferred, layout: Layout, options: Options, table: Table = STRATEGIES
) -> ParallelModel:
    """`model`: plain, on one device; or deferred: then no rank ever holds all of it, if the engine shards it.

    `table`: where `options.parallel.data` is looked up.
    """
    check_parallel(options.parallel, layout.world.device.type, options.precision, options.compile != "none", table)
    engine = table[options.parallel.data](layout, options)
    tensors: Iterator[tuple[str, Tensor]] | None = None
    if isinstance(model, Deferred):
        if engine.fills_parts:
            model, tensors = model.on_meta()
        else:
            model = model.whole()
    if tensors is None:
        check_same_model(model, layout.norm)
        take_weights_of_first_rank(model, layout)
    with models_are_equal():
        return _spread(model, layout, options, engine, tensors)


def _spread(
    model: nn.Module,
    layout: Layout,
    options: Options,
    engine: Engine,
    tensors: Iterator[tuple[str, Tensor]] | None,
) -> ParallelModel:
    """`tensors`: the weights of a model on the meta device, one at a time."""
    if options.precision == "fp8" and not any(isinstance(part, Float8Linear) for part in model.modules()):
        raise UserError("precision fp8 is for a model that multiplies in FP8; call lockstep.in_float8(model) first")
    parameters, matrices = parameter_count(model), matrices_in(model)
    parallel = options.parallel
    place = None if tensors is not None else layout.world.device
    model, cut, is_placed = cut_model(model, layout, options, place)
    here = not parallel.recompute_stages or layout.coordinates["pp"] in parallel.recompute_stages
    if here and (not isinstance(model, Stage) or blocks_of(model)):  # a stage may have the embedding only
        recompute(model, options.recompute, options.recompute_every)
    if not is_placed:
        model.to(place, options.dtype)
    if engine.fills_parts:  # it shards block by block
        compile_blocks(model, options)
    else:
        compile_model(model, options)
    engine.wrap(model)
    if tensors is not None:
        fill(engine, of_first_rank(tensors, layout.norm, layout.world.device))
    if isinstance(engine.local_optimizer, Muon):
        engine.local_optimizer.assign_held(engine.trained(), matrices, layout.norm)
    if options.ema is not None:
        WeightAverage(engine.local_optimizer, options.ema)
    return ParallelModel(engine, parameters, cut)


@torch.no_grad()
def take_weights_of_first_rank(model: nn.Module, layout: Layout) -> None:
    """Once, before it is cut; on the run's device, one tensor at a time."""
    for tensor in [*model.parameters(), *model.buffers()] if layout.norm.size > 1 else []:
        device = layout.world.device
        first = broadcast(tensor.detach().to(device).contiguous(), group=layout.norm, purpose="parameters")
        tensor.copy_(first)


@torch.no_grad()
def fill(engine: Engine, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Give each region that this rank holds its part of the whole tensors, which come one at a time."""
    held, buffers = engine.held(), dict(engine.model.named_buffers())
    for name, whole in tensors:
        if name in held:
            mine = held[name].tensor
            mine.copy_(held[name].region.read(whole).view(mine.shape))
        elif name in buffers:  # else another stage's
            buffers[name].copy_(whole)


def of_first_rank(
    tensors: Iterator[tuple[str, Tensor]], group: Group, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as the first rank has it, one at a time."""
    for name, tensor in tensors:
        yield name, broadcast(tensor.to(device).contiguous(), group=group, purpose="parameters")
