"""Strategies that are not equal to one process by nature, and the law that each is held to instead."""

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.apart import relative
from lockstep.comm.collectives import all_gather_objects, all_reduce
from lockstep.config import Parallel
from lockstep.data import Share
from lockstep.layout.world import World
from lockstep.parallel.data.bucket import Bucket
from lockstep.parallel.data.compression import ErrorFeedback, Reducer, make_reducer
from lockstep.strategies import STRATEGIES
from lockstep.strategies.table import Table
from lockstep.verify.compare import TOLERANCE, spread
from lockstep.verify.reference import Reference
from lockstep.verify.scenarios import SMALL_CNN, Scenario

FEEDBACK_STEPS = 6


def check_law(world: World, parallel: Parallel, precision: str) -> str | None:
    """Hold a compression to its law on gradients made for the purpose; None, or how it was broken."""
    if parallel.compression == "none":
        return None  # its law is its equal form
    dtype = torch.float64 if precision == "fp64" else torch.float32
    if parallel.compression in ("bf16", "fp16"):
        broken = _rounding(world, parallel, dtype)
    else:
        broken = _nothing_is_lost(world, parallel, dtype, TOLERANCE[precision])
        if not any(all_gather_objects(broken is not None)) and parallel.compression == "powersgd":
            broken = _low_rank_is_exact(world, parallel, dtype, TOLERANCE[precision])
    return next((b for b in all_gather_objects(broken) if b is not None), None)


def _bucket(dtype: torch.dtype, device: torch.device) -> Bucket:
    shapes = ((24, 16), (16,), (8, 4, 3, 3))
    return Bucket([nn.Parameter(torch.zeros(s, dtype=dtype, device=device)) for s in shapes])


def _random_gradients(bucket: Bucket, world: World, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + world.rank)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in bucket.parameters]


def _reduced(bucket: Bucket, gradients: list[Tensor], reducer: Reducer) -> tuple[Tensor, Tensor]:
    """(what the reducer makes of the ranks' gradients, their true mean)."""
    for index, gradient in enumerate(gradients):
        bucket.parameters[index].grad = gradient.to(bucket.buffer)
        bucket.place(index)
    bucket.raise_flags()
    mean = all_reduce(bucket.gradients.clone(), purpose="check")
    bucket.finish = reducer.start(bucket)
    bucket.hand_over()
    return bucket.gradients.clone(), mean


def _rounding(world: World, parallel: Parallel, dtype: torch.dtype) -> str | None:
    bucket = _bucket(dtype, world.device)
    got, mean = _reduced(bucket, _random_gradients(bucket, world, 0), make_reducer(parallel.compression, 0.0, 1))
    unit = 2.0**-8 if parallel.compression == "bf16" else 2.0**-11
    error = float((got - mean).norm() / mean.norm())
    allowed = unit * max(1.0, world.size / 4)  # each number is rounded by half a unit at most, and so is each sum
    return None if error <= allowed else f"relative error {error:.1e} exceeds {allowed:.1e}"


def _nothing_is_lost(world: World, parallel: Parallel, dtype: torch.dtype, tolerance: float) -> str | None:
    """Over several steps: what was sent plus what the ranks keep is the sum of all mean gradients."""
    bucket = _bucket(dtype, world.device)
    reducer = make_reducer(parallel.compression, 0.1, 2)
    assert isinstance(reducer, ErrorFeedback)
    sent, given = torch.zeros_like(bucket.gradients), torch.zeros_like(bucket.gradients)
    for step in range(FEEDBACK_STEPS):
        got, mean = _reduced(bucket, _random_gradients(bucket, world, step), reducer)
        sent, given = sent + got, given + mean
    assert reducer.residual is not None
    kept = all_reduce(copy.deepcopy(reducer.residual), purpose="check")
    lost = relative(sent + kept, given)
    return None if lost <= tolerance else f"error feedback lost {lost:.1e} over {FEEDBACK_STEPS} steps"


def _low_rank_is_exact(world: World, parallel: Parallel, dtype: torch.dtype, tolerance: float) -> str | None:
    """Rank-1 gradients with one common row space must pass a rank-2 approximation unharmed."""
    bucket = _bucket(dtype, world.device)
    reducer = make_reducer(parallel.compression, 0.1, 2)
    common = torch.Generator().manual_seed(5)
    values = []
    for parameter, own in zip(bucket.parameters, _random_gradients(bucket, world, 0), strict=True):
        row = torch.randn(1, parameter.numel() // parameter.shape[0], generator=common, dtype=torch.float64)
        values.append((own.flatten(1).sum(1, keepdim=True) @ row).view_as(own) if own.dim() > 1 else own)
    got, mean = _reduced(bucket, values, reducer)
    error = relative(got, mean)
    return None if error <= tolerance else f"a gradient of rank 1 came back wrong by {error:.1e}"


# ---- ranks that train apart ----------------------------------------------------------------------------------------

APART_STEPS, APART_EVERY = 6, 2


def check_apart(world: World, parallel: Parallel, precision: str, table: Table = STRATEGIES) -> str | None:
    """Three rounds of two steps, against as many workers in one process: plain averaging, or an outer optimizer with
    Nesterov's momentum, written out.
    """
    scenario = Scenario("apart", SMALL_CNN, (4 * world.size,))
    reference = Reference(world, scenario, 1, precision, "sgd")
    strategy = spread(reference, replace(parallel, sync_every=APART_EVERY), table)
    workers = [scenario.build(seed=0).to(world.device, reference.dtype) for _ in range(world.size)]
    optimizers = [reference.make_optimizer(worker.parameters()) for worker in workers]
    starts = [p.detach().clone() for p in workers[0].parameters()]
    momenta = [torch.zeros_like(p) for p in starts]
    for step in range(APART_STEPS):
        batch = scenario.global_batch(step).to(world.device, reference.dtype)
        strategy.step(batch.share(strategy.batch_share()))
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            mine = batch.share(Share(rank, world.size))
            optimizer.zero_grad()
            F.cross_entropy(worker(mine.inputs), mine.targets).backward()
            optimizer.step()
        if step % APART_EVERY == APART_EVERY - 1:
            _average(workers, starts, momenta, parallel)
    held = strategy.held()
    for name, parameter in workers[0].named_parameters():
        error = relative(held[name].tensor, parameter.detach())
        if error > TOLERANCE[precision]:
            return f"after {APART_STEPS} steps {name} is {error:.1e} away from {world.size} simulated workers"
    return None


@torch.no_grad()
def _average(workers: list[nn.Module], starts: list[Tensor], momenta: list[Tensor], parallel: Parallel) -> None:
    columns = zip(*(worker.parameters() for worker in workers), strict=True)
    for start, momentum, copies in zip(starts, momenta, columns, strict=True):
        mean = torch.stack([p.detach() for p in copies]).mean(0)
        if parallel.outer_lr:
            outer = start - mean
            momentum.mul_(parallel.outer_momentum).add_(outer)
            mean = start - parallel.outer_lr * (outer + parallel.outer_momentum * momentum)
        start.copy_(mean)
        for parameter in copies:
            parameter.copy_(mean)
