"""What saving beside training costs: steps while a checkpoint is written against steps while none is.

python docs/results/measure_saving.py [--share-gpu]

On a GPU it is GPT-2 medium in bf16, whose copies to the host go on beside the next step.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.comm.collectives import all_gather_objects, barrier
from lockstep.config import GPT, load_config
from lockstep.data import read_share
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.training.prepare import load_data, prepare_strategy

ROUNDS, STEPS = 3, 3
CONFIG = "bench_gpt25m"


def measure(world: World, folder: Path) -> str:
    config = load_config(CONFIG)
    if world.device.type == "cuda":
        config.model = GPT(size="medium", context=512, vocabulary=50304)
        config.train.precision, config.train.batch_size = "bf16", 16
    config.train.optimizer, config.parallel.data = "adamw", "zero3"
    dataset = load_data(world, config)
    strategy = prepare_strategy(world, config, dataset)
    batch = read_share(dataset.train, torch.arange(config.train.batch_size), strategy.batch_share())
    beside = Checkpoints(world, folder / "beside")
    blocking = Checkpoints(world, folder / "blocking", asynchronous=False, group=beside.group)
    times: dict[str, list[float]] = {"step": [], "step while saving": [], "stop": [], "blocking save": []}

    def timed(what: str, action: object) -> None:
        settled(world)
        start = time.perf_counter()
        action()  # type: ignore[operator]
        if what != "stop":
            settled(world)
        times[what].append(1e3 * (time.perf_counter() - start))

    for _ in range(STEPS):
        strategy.step(batch)
    for number in range(ROUNDS):
        for _ in range(STEPS):
            timed("step", lambda: strategy.step(batch))
        timed("stop", lambda number=number: beside.save(strategy, {"step": number}))
        while any_rank_saves(beside):
            timed("step while saving", lambda: strategy.step(batch))
        timed("blocking save", lambda number=number: blocking.save(strategy, {"step": number}))
    assert beside.problem is None
    assert blocking.problem is None
    ratio = median(times["step while saving"]) / median(times["step"])
    shown = ", ".join(f"{what} {median(ms):.0f} ms ({len(ms)})" for what, ms in times.items())
    return f"{shown}; a step while saving takes {ratio:.2f} of one without"


def settled(world: World) -> None:
    """The GPU has done what it was given, on every rank."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    barrier()


def any_rank_saves(checkpoints: Checkpoints) -> bool:
    return any(all_gather_objects(checkpoints.saving))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--share-gpu", action="store_true")
    on_gpu = parser.parse_args().share_gpu
    launch = Launch(nproc=2, share_gpu=True) if on_gpu else Launch(nproc=2, device="cpu")
    with tempfile.TemporaryDirectory() as place:
        print(run_on_ranks(measure, Path(place), launch=launch)[0])
