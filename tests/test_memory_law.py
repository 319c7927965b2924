"""The law of ZeRO's memory: what each stage holds of parameters, gradients and optimizer state."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config import GPT, Config, Data, Parallel, Train
from lockstep.data import build_data
from lockstep.layout.world import World
from lockstep.models import parameter_count
from lockstep.strategies import strategy_named
from lockstep.training.prepare import prepare_strategy, prepared_model
from tests.ranks import LONG, on_ranks


def memory_of(tensors: list[Tensor]) -> float:
    """Bytes that these tensors cover together; what two of them share counts once."""
    total = reached = 0
    for start, end in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return float(total)


def held_bytes(world: World, name: str) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state that this rank holds when the optimizer has stepped."""
    config = Config(
        model=GPT(d_model=32, layers=4, heads=2, context=8, vocabulary=64),
        data=Data(name="synthetic", samples=16),
        train=Train(batch_size=8, optimizer="adamw", lr=1e-3),
        parallel=strategy_named(name, Parallel(bucket_mb=0.05)),
    )
    dataset = build_data(config)
    strategy = prepare_strategy(world, config, dataset)
    strategy.step(dataset.train.batch(torch.arange(2)))
    strategy.settle()
    module: Any = strategy.engine.module
    gradients = strategy.worker.gradients.tensors()
    if name in ("zero1", "zero2"):
        gradients += [tensor for bucket in module.buckets for tensor in (bucket.own, bucket.buffer)]
    if name == "zero3":
        gradients += module.gradient_buffers()
    state = [value for of_one in strategy.engine.local_optimizer.state.values() for value in of_one.values()]
    plain = prepared_model(config, dataset.spec)
    unit = max(sum(p.nbytes for p in block.parameters()) for block in plain.blocks)  # type: ignore[union-attr]
    return {
        "parameters": memory_of([p.data for p in strategy.model.parameters()]),
        "gradients": memory_of(gradients),
        "state": memory_of([tensor for tensor in state if tensor.dim()]),
        "psi": 4.0 * parameter_count(plain),
        "unit": float(max(unit, 2 * 0.05 * 1024 * 1024)),
    }


def check_law(world: World) -> None:
    n = world.size
    for name, shares in {
        "bucketed": (1.0, 1.0, 2.0),
        "zero1": (1.0, 1.0, 2.0 / n),
        "zero2": (1.0, 1.0 / n, 2.0 / n),
        "zero3": (1.0 / n, 1.0 / n, 2.0 / n),
    }.items():
        held = held_bytes(world, name)
        for what, share in zip(("parameters", "gradients", "state"), shares, strict=True):
            share_bytes = share * held["psi"]
            buffers = 2 if what == "gradients" and name in ("zero2", "zero3") else 1  # in turn: one is in flight
            fits = 0.99 * share_bytes <= held[what] <= share_bytes + buffers * held["unit"]
            assert fits, f"{name}, {n} ranks: {what} {held[what]:,.0f} bytes, by theory {share_bytes:,.0f}"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_stage_keeps_its_law(ranks: int) -> None:
    on_ranks(check_law, ranks, timeout=LONG)
