"""What each knob buys in the training of GPT-2 on one GPU: all variants in one process, in turns.

python docs/results/measure_one_gpu.py small
python docs/results/measure_one_gpu.py xl --variants compiled all
python docs/results/measure_one_gpu.py xl --variants script all

Each variant has what the ones above it have, and one thing more; `script` is plain_gpt2.py, which has nothing of
Lockstep. A turn is some steps without a pause, as in training.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from plain_gpt2 import Script

from lockstep.config import Config, load_config
from lockstep.config.shipped import find_config
from lockstep.data import Sampler
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.strategies import ParallelModel, StepResult
from lockstep.training.prepare import load_data, prepare_strategy


@dataclass
class Variant:
    """A config, and what of the package is switched off."""

    says: str
    vocabulary: int = 50304
    residual: str = "compute"
    compile: str = "model"
    fused_adamw: bool = True
    waits: bool = False
    """The host reads each step's loss before it issues the next."""
    cross_entropy: bool = True
    gelu: bool = True

    def config(self, size: str) -> Config:
        config = load_config(find_config(f"gpt2_{size}"))
        model: Any = config.model
        model.vocabulary, model.residual, model.own_gelu = self.vocabulary, self.residual, self.gelu
        train: Any = config.train
        train.compile = self.compile
        return replace(config, data=replace(config.data, samples=4 * train.batch_size))

    @contextmanager
    def switched(self) -> Iterator[None]:
        with ExitStack() as stack:
            if not self.fused_adamw:
                stack.enter_context(patch("lockstep.training.optimizer.should_fuse", lambda _: False))
            if not self.cross_entropy:
                stack.enter_context(patch("lockstep.models.loss.MANY_CLASSES", 10**9))
            yield


ALL = Variant("our own gelu(x + bias)")
THEIR_GELU = replace(ALL, says="the residual stream in bf16", gelu=False)
WIDE = replace(THEIR_GELU, says="our own cross entropy", residual="fp32")
COMPILED = replace(WIDE, says="no host wait in the loop", cross_entropy=False)
WAITING = replace(COMPILED, says="fused AdamW", waits=True)
UNFUSED = replace(WAITING, says="compiled as one", fused_adamw=False)
EAGER = replace(UNFUSED, says="vocabulary padded to 50304", compile="none")
VARIANTS = {
    "script": replace(ALL, says="a plain script with nothing of Lockstep"),
    "plain": replace(EAGER, says="plain: autocast, AdamW, PyTorch's choice of attention", vocabulary=50257),
    "padded": EAGER,
    "compiled": UNFUSED,
    "fused-adamw": WAITING,
    "no-wait": COMPILED,
    "cross-entropy": WIDE,
    "residual": THEIR_GELU,
    "all": ALL,
}


@dataclass
class Runner:
    variant: Variant
    strategy: ParallelModel | Script
    batches: list[Any]

    def seconds_per_step(self, steps: int) -> float:
        with self.variant.switched():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for step in range(steps):
                result = self.strategy.step(self.batches[step % len(self.batches)])
                if self.variant.waits:
                    assert isinstance(result, StepResult)
                    _ = result.loss
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / steps


def measure(world: World, size: str, names: list[str], turns: int, steps: int) -> None:
    torch._dynamo.config.recompile_limit = 64
    runners: dict[str, Runner] = {}
    for name in names:
        variant = VARIANTS[name]
        config = variant.config(size)
        dataset = load_data(world, config)
        begun = time.perf_counter()
        strategy: ParallelModel | Script
        if name == "script":
            strategy = Script(size, world.device)
        else:
            with variant.switched():
                strategy = prepare_strategy(world, config, dataset)
        sampler = Sampler(len(dataset.train), config.train.batch_size, 0)
        batches = [dataset.train.batch(indices) for indices in sampler.epoch(0)]
        runners[name] = Runner(variant, strategy, batches)
        runners[name].seconds_per_step(3)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name}: ready in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    tokens = config.train.batch_size * dataset.spec.shape[0]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(turns):
        for name, runner in runners.items():
            torch.cuda.empty_cache()  # what the one before it kept; the first step is for taking memory again
            runner.seconds_per_step(1)
            times[name].append(runner.seconds_per_step(steps))
    print(
        f"\nGPT-2 {size}, {tokens:,} tokens per step, bf16, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    print(f"{turns} turns of {steps} steps; median\n")
    print(f"{'variant':<14} {'ms/step':>8} {'tokens/s':>9} {'bought':>7}  what it adds to the one above")
    before = None
    for name, seconds in times.items():
        step = median(seconds)
        bought = f"{before / step - 1:+.1%}" if before else ""
        print(f"{name:<14} {1e3 * step:8.2f} {tokens / step:9,.0f} {bought:>7}  {VARIANTS[name].says}", flush=True)
        before = step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=("small", "xl"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS)[1:])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    run_on_ranks(
        *(measure, given.size, given.variants, given.turns, given.steps),
        launch=Launch(nproc=1, device="cuda", timeout=3600),
    )
