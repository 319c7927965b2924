"""What a mixture of experts reaches on one GPU, beside the dense model of equal active FLOP; in turns, in one process.

python docs/results/measure_experts.py [--size small] [--batch 64] [--experts 32] [--turns 4] [--steps 8]

MFU counts what a token passes: attention, its experts, router, head. Random data, bf16, AdamW, compiled blocks.
"""

import argparse
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from lockstep.config import GPT, Config, Data, Parallel, Train
from lockstep.data import Sampler, read_share
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.training.prepare import load_data, prepare_strategy

PEAK = 989e12
"""Of an H200 in bf16, by its datasheet."""


def models(size: str, width: int, counts: tuple[int, ...] = (32, 64)) -> dict[str, GPT]:
    """`width`: of the dense SwiGLU, which the active experts share."""
    form: dict[str, Any] = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "residual": "compute"}
    dense = GPT(size=size, context=1024, vocabulary=50304, **form)  # type: ignore[arg-type]
    found = {"dense": dense}
    for count in counts:
        active = count // 8
        found[f"{count} experts, {active} active"] = replace(
            dense, experts=count, active=active, expert_width=width // active
        )
    return found


def measure(world: World, size: str, batch: int, turns: int, steps: int, width: int, experts: tuple[int, ...]) -> None:
    runners: dict[str, Any] = {}
    for name, model in models(size, width, experts).items():
        train = Train(batch_size=batch, optimizer="adamw", lr=3e-4, precision="bf16", compile="blocks", clip_norm=1.0)
        config = Config(model, Data("synthetic", samples=4 * batch), train, Parallel("single"))
        dataset = load_data(world, config)
        strategy = prepare_strategy(world, config, dataset)
        order = list(Sampler(len(dataset.train), batch, 0).epoch(0))
        batches = [read_share(dataset.train, rows, strategy.batch_share()).to(world.device) for rows in order]
        for _ in range(3):
            loss = strategy.step(batches[0]).loss
        torch.cuda.reset_peak_memory_stats()
        runners[name] = (strategy, batches, [], loss)
    for _ in range(turns):
        for strategy, batches, seconds, _ in runners.values():
            strategy.step(batches[0])
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for step in range(steps):
                strategy.step(batches[step % len(batches)])
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000 / steps)
    print(f"GPT {size}, batch {batch} x 1,024 tokens, {turns} turns of {steps} steps")
    print(f"{'model':<24}{'parameters':>14}{'active':>14}{'ms':>9}{'tokens/s':>12}{'MFU %':>8}{'of dense':>10}")
    dense = None
    for name, (strategy, _, seconds, _) in runners.items():
        flops, took = strategy.flops_per_sample * batch, median(seconds)
        mfu = flops / took / PEAK
        dense = dense or mfu
        active = strategy.flops_per_sample / 6 / 1024
        print(
            f"{name:<24}{strategy.parameters:>14,}{active / 1e6:>12.1f} M{took * 1000:>9.1f}"
            f"{batch * 1024 / took:>12,.0f}{100 * mfu:>8.1f}{mfu / dense:>10.3f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--experts", type=int, nargs="+", default=[32, 64], help="an eighth of them are active")
    given = parser.parse_args()
    launch = Launch(nproc=1, device="cuda")
    counted = given.batch, given.turns, given.steps
    run_on_ranks(measure, given.size, *counted, given.width, tuple(given.experts), launch=launch)
