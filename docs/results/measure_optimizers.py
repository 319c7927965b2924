"""What an optimizer's step costs: GPT-2 small as its config trains it, under several optimizers, in turns.

python docs/results/measure_optimizers.py [--nproc 1] [--data single] [--turns 4] [--steps 10]
python docs/results/measure_optimizers.py --nproc 2 --data zero1    # two ranks that share the GPU
"""

import argparse
from dataclasses import replace

from in_turns import Runner, in_turns

from lockstep.config import Parallel, load_config
from lockstep.config.shipped import find_config
from lockstep.data import Sampler, read_share
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.training.prepare import load_data, prepare_strategy

OPTIMIZERS = ("adamw", "muon", "adamw_8bit", "adamw_bf16")


def measure(world: World, data: str, turns: int, steps: int) -> None:
    runners: dict[str, Runner] = {}
    plain = load_config(find_config("gpt2_small"))
    plain = replace(plain, data=replace(plain.data, samples=plain.train.batch_size), parallel=Parallel(data))
    for optimizer in OPTIMIZERS:
        how = replace(plain.train, optimizer=optimizer, compile="model" if world.size == 1 else "blocks")
        config = replace(plain, train=how)
        dataset = load_data(world, config)
        strategy = prepare_strategy(world, config, dataset)
        rows = next(iter(Sampler(len(dataset.train), how.batch_size, 0).epoch(0)))
        runners[optimizer] = strategy, read_share(dataset.train, rows, strategy.batch_share()).to(world.device)
    times = in_turns(runners, turns, steps)
    if world.is_main:
        print(f"GPT-2 small, {plain.train.batch_size} x 1,024 tokens, {data}, ranks: {world.size}")
        print(f"{'optimizer':<12}{'ms/step':>9}{'over adamw':>12}")
        for name, took in times.items():
            print(f"{name:<12}{1000 * took:>9.2f}{took / times['adamw']:>12.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--data", default="single")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    launch = Launch(nproc=given.nproc, device="cuda", share_gpu=given.nproc > 1)
    run_on_ranks(measure, given.data, given.turns, given.steps, launch=launch)
