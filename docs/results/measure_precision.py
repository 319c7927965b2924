"""What FP8 gains over bf16 on one GPU, and what it costs in loss; variants in one process, in turns.

python docs/results/measure_precision.py time [--sizes small xl 4096] [--turns 4]
python docs/results/measure_precision.py loss [--seeds 0 1 2] [--steps 600]

time: whole steps of GPT-2 small and xl as their configs train them, but compiled block by block; and of four layers of
width 4,096 in Llama's form.
loss: a GPT of width 512 on the sources of Python's standard library; the test loss at the end, of each seed.
"""

import argparse
import gc
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from in_turns import Runner, in_turns

from lockstep.config import GPT, Config, Data, Fp8, Parallel, Train, load_config
from lockstep.config.shipped import find_config
from lockstep.data import Sampler, read_share
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.training.loop import train
from lockstep.training.prepare import load_data, prepare_strategy

VARIANTS: dict[str, tuple[Any, Any]] = {
    "bf16": ("bf16", "row"),
    "fp8, row": ("fp8", "row"),
    "fp8, tensor": ("fp8", "tensor"),
}


def config_of(size: str) -> Config:
    if size in ("small", "xl"):
        config = load_config(find_config(f"gpt2_{size}"))
        config.train.compile = "blocks"
        return replace(config, data=replace(config.data, samples=2 * config.train.batch_size))
    form: dict[str, Any] = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "residual": "compute"}
    width = int(size)
    model = GPT(d_model=width, layers=4, heads=width // 128, context=4096, vocabulary=32000, tied=False, **form)
    how = Train(batch_size=4, optimizer="adamw", lr=1e-4, precision="bf16", compile="blocks")
    return Config(model, Data("synthetic", samples=8), how, Parallel("single"))


def measure_time(world: World, sizes: list[str], turns: int, steps: int) -> None:
    print(f"{'model':<8}{'precision':<14}{'ms':>9}{'tokens/s':>12}{'over bf16':>11}")
    for size in sizes:
        runners: dict[str, Runner] = {}
        plain = config_of(size)
        for name, (precision, scaling) in VARIANTS.items():
            config = replace(plain, train=replace(plain.train, precision=precision), fp8=Fp8(scaling))
            dataset = load_data(world, config)
            strategy = prepare_strategy(world, config, dataset)
            rows = next(iter(Sampler(len(dataset.train), config.train.batch_size, 0).epoch(0)))
            batch = read_share(dataset.train, rows, strategy.batch_share()).to(world.device)
            runners[name] = (strategy, batch)
        times = in_turns(runners, turns, steps)
        tokens = plain.train.batch_size * getattr(plain.model, "context", 0)
        for name, took in times.items():
            faster = times["bf16"] / took
            print(f"{size:<8}{name:<14}{1000 * took:>9.1f}{tokens / took:>12,.0f}{faster:>11.3f}", flush=True)
        runners.clear()
        del strategy, batch
        gc.collect()
        torch.cuda.empty_cache()


def measure_loss(world: World, seeds: list[int], steps: int) -> None:
    model = GPT(d_model=512, layers=6, heads=8, context=256, residual="compute")
    print(f"test loss after {steps} steps\n{'seed':<8}" + "".join(f"{name:>14}" for name in VARIANTS))
    every = []
    for seed in seeds:
        row = []
        for precision, scaling in VARIANTS.values():
            how = Train(batch_size=64, steps=steps, optimizer="adamw", lr=1e-3, warmup_steps=steps // 20, seed=seed)
            how.precision, how.compile, how.weight_decay, how.evaluate_every = precision, "blocks", 0.1, 0
            config = Config(model, Data("text", max_bytes=8_000_000), how, Parallel("single"), fp8=Fp8(scaling))
            result = train(world, config, quiet=True)
            row.append(result.test_loss)
        every.append(row)
        print(f"{seed:<8}" + "".join(f"{loss:>14.4f}" for loss in row), flush=True)
    print(f"{'mean':<8}" + "".join(f"{mean(column):>14.4f}" for column in zip(*every, strict=True)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["time", "loss"])
    parser.add_argument("--sizes", nargs="+", default=["small", "xl", "4096"])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=None, help="of a turn (6), or of training (600)")
    given = parser.parse_args()
    launch = Launch(nproc=1, device="cuda")
    if given.what == "time":
        run_on_ranks(measure_time, given.sizes, given.turns, given.steps or 6, launch=launch)
    else:
        run_on_ranks(measure_loss, given.seeds, given.steps or 600, launch=launch)
