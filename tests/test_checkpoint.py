"""Checkpoints: saved under any layout, loaded under any other; whole or not at all."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import GPT, Config, Data, Parallel, Train
from lockstep.data import Sampler, read_share
from lockstep.parallel.checkpointable import boxes
from lockstep.strategies import available_strategies, strategy_named
from lockstep.training import prepare_strategy
from lockstep.training.checkpoint import Checkpoints
from lockstep.training.prepare import load_data
from lockstep.world import World
from tests.ranks import on_ranks

TINY = GPT(d_model=12, layers=2, heads=2, context=6, vocabulary=19, dropout=0.0)
STEPS_AFTER = 10


@given(st.data())
def test_boxes_cover_a_range_of_elements_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = []
    for offsets, sizes in boxes(shape, start, stop):
        found += whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten().tolist()
    assert found == list(range(start, stop))
    assert len(boxes(shape, start, stop)) <= max(1, 2 * len(shape) - 1)


# ---- from layout to layout -----------------------------------------------------------------------------------


def config_for(name: str) -> Config:
    precision = "fp32" if name.startswith("deepspeed") else "fp64"
    train = Train(batch_size=6, optimizer="adamw", lr=1e-3, weight_decay=0.01, precision=precision, clip_norm=1.0)
    parallel = strategy_named(name, Parallel(bucket_mb=0.001))
    return Config(model=TINY, data=Data(name="synthetic", samples=60), train=train, parallel=parallel)


def go_on(world: World, config: Config, strategy: Any, first: int, steps: int) -> list[float]:
    dataset = load_data(world, config)
    sampler = Sampler(len(dataset.train), config.train.batch_size, config.train.seed)
    order = [indices for epoch in range(3) for indices in sampler.epoch(epoch)]
    share = strategy.batch_share()
    return [strategy.step(read_share(dataset.train, i, share)).loss for i in order[first : first + steps]]


def session(world: World, loads: list[tuple[str, str, str]], saves: list[str], base: Path) -> dict[Any, Any]:
    """Save with each of `saves` after 3 steps, then load (ranks, saver, loader); each goes on for 10 steps."""
    found: dict[Any, Any] = {}
    for name in saves:
        config = config_for(name)
        strategy = prepare_strategy(world, config, load_data(world, config))
        go_on(world, config, strategy, 0, 3)
        weights = strategy.full_state_dict()
        Checkpoints(world, base / str(world.size) / name).save(strategy, {"step": 3}, wait=True)
        found[name] = (weights, go_on(world, config, strategy, 3, STEPS_AFTER))
    for ranks, saver, loader in loads:
        config = config_for(loader)
        config.train.precision = "fp32" if "deepspeed" in (saver, loader) else "fp64"
        strategy = prepare_strategy(world, config, load_data(world, config))
        checkpoints = Checkpoints(world, base / ranks / saver)
        whole, damage = checkpoints.find()
        assert whole is not None
        assert damage == []
        assert checkpoints.load(whole, strategy)["step"] == 3
        weights = strategy.full_state_dict()
        found[ranks, saver, loader] = (weights, go_on(world, config, strategy, 3, STEPS_AFTER))
    return found


def test_every_layout_loads_every_other(tmp_path: Path) -> None:
    """1, 2 and 3 ranks; every strategy as the one that saves and as the one that loads."""
    engines = ["deepspeed"] if "deepspeed" in available_strategies() else []
    two = ["bucketed", "zero1", "zero3", "fsdp", "zero1_torch", *engines]
    three = ["zero2", "zero3", "ddp", "fsdp"]
    among_two = [("2", a, b) for a, b in pairwise([*two, two[0]])]
    among_three = [("3", a, b) for a, b in pairwise([*three, three[0]])]
    sessions: list[tuple[int, list[tuple[str, str, str]], list[str]]] = [
        (2, among_two, two),
        (3, [("2", "zero3", "zero3"), ("2", "fsdp", "zero2"), ("2", "zero1", "fsdp"), *among_three], three),
        (1, [("3", "zero3", "single"), ("2", "zero1_torch", "single")], ["single"]),
        (
            2,
            [("1", "single", "zero3"), ("1", "single", "fsdp"), ("3", "zero3", "zero1"), ("3", "fsdp", "bucketed")],
            [],
        ),
    ]
    saved: dict[tuple[str, str], Any] = {}
    for ranks, loads, saves in sessions:
        found = on_ranks(session, ranks, loads, saves, tmp_path, timeout=100)[0]
        saved |= {(str(ranks), name): found[name] for name in saves}
        for source, saver, loader in loads:
            (weights, losses), (then, later) = found[source, saver, loader], saved[source, saver]
            for name, tensor in then.items():
                assert torch.equal(weights[name], tensor.to(weights[name].dtype)), (source, saver, loader, name)
            tolerance = 1e-12 if "deepspeed" not in (saver, loader) else 2e-5
            assert losses == pytest.approx(later, abs=tolerance), (source, saver, ranks, loader)
