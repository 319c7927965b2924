"""What one rank does before its first step, in worlds of 8 to 4,096 ranks that are not there.

torch's fake process group answers every collective at once, so what is measured is this rank's own work, on one core.

    python docs/results/measure_startup.py [--sizes 8 64 512 4096] [--rank 3]

Objects that ranks exchange are answered by as many copies of this rank's own, and pay for being packed and unpacked.
"""

import argparse
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.checkpoint.snapshot import Snapshots
from lockstep.comm import collectives
from lockstep.config import GPT, Config, Data, Parallel, Train
from lockstep.data import DataSet, DataSpec, build_data
from lockstep.launch.calls import Call
from lockstep.launch.situation import Situation, report
from lockstep.layout.group import Group, group_of
from lockstep.layout.world import World
from lockstep.parallel import counting
from lockstep.parallel.counting import count_once
from lockstep.strategies import strategy_named
from lockstep.training.prepare import prepare_strategy

MODEL = GPT(d_model=512, layers=16, heads=8, context=128, vocabulary=4096, tied=False)
LAYOUTS = {8: "zero3,tp=2", 64: "zero3,tp=8", 512: "zero3,tp=8", 4096: "zero3,tp=8"}


def answered(value: Any, group: Any = None) -> list[Any]:
    """As `all_gather_objects` of ranks that all say the same."""
    text = pickle.dumps(value)
    return [pickle.loads(text) for _ in range(group_of(group).size)]


def others_table(mine: np.ndarray, group: Group, device: torch.device) -> np.ndarray:
    """As many rows of every rank: each has its own pieces of the same parameters."""
    table = np.repeat(mine[None], group.size, axis=0)
    table[:, :, counting.REGION] += np.arange(group.size)[:, None]
    table[:, :, counting.HELD] //= group.size
    return table


@contextmanager
def world_of(size: int, rank: int) -> Iterator[World]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield World(rank, size, rank % 8, backend="fake")
    finally:
        dist.destroy_process_group()


def patched_everywhere(name: str, value: Callable[..., Any]) -> None:
    original = getattr(collectives, name)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and getattr(module, name, None) is original:
            setattr(module, name, value)


def measure(size: int, rank: int, dataset: DataSet) -> dict[str, float]:
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[what] = time.perf_counter() - start

    parallel = strategy_named(LAYOUTS.get(size, "zero3"), Parallel(micro_batches=16))
    config = Config(MODEL, Data(name="synthetic"), Train(batch_size=size * 16), parallel)
    with world_of(size, rank) as world:
        with timed("layout, model, shards"):
            strategy = prepare_strategy(world, config, dataset)
        with timed("which elements to count"):
            held = strategy.engine.trained()
            count_once({name: h.region for name, h in held.items()}, strategy.layout.norm, world.device)
        with timed("state to save"):
            Snapshots().take(strategy.state.state_dict(), in_the_background=False)
        with timed("a hang explained"):
            call = Call("world", tuple(range(size)), 7, "all_reduce of 1,024 float32", False)
            texts = [Situation(r, "node", r, [call]).to_json() for r in range(size)]
            report({r: Situation.from_json(text) for r, text in enumerate(texts)}, {})
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(LAYOUTS))
    parser.add_argument("--rank", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    patched_everywhere("all_gather_objects", answered)
    counting.gather_rows = others_table
    spec_config = Config(MODEL, Data(name="synthetic", samples=64), Train(), Parallel())
    dataset = build_data(spec_config)
    assert isinstance(dataset.spec, DataSpec)
    measure(given.sizes[0], given.rank, dataset)  # what is imported, and compiled, the first time
    rows = {size: measure(size, given.rank, dataset) for size in given.sizes}
    print(f"seconds of rank {given.rank}, one core, {MODEL.layers} layers of width {MODEL.d_model}")
    width = max(len(what) for what in rows[given.sizes[0]])
    print(" " * width + "".join(f"{size:>10,}" for size in given.sizes) + "  ranks")
    for what in rows[given.sizes[0]]:
        print(f"{what:<{width}}" + "".join(f"{rows[size][what]:>10.2f}" for size in given.sizes))
    print(f"{'together':<{width}}" + "".join(f"{sum(rows[size].values()):>10.2f}" for size in given.sizes))


if __name__ == "__main__":
    main()
