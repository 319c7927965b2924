"""Strategies that are not equal to one process by nature, and the law that each is held to instead."""

import copy

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_objects, all_reduce
from lockstep.config import Parallel
from lockstep.layout.world import World
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.compression import ErrorFeedback, Reducer, make_reducer
from lockstep.verify.compare import TOLERANCE, relative

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
        if broken is None and parallel.compression == "powersgd":
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
    allowed = unit * world.size
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
