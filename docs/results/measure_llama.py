"""Llama 3 8B whole on one GPU: tokens a second and memory, in bf16 and FP8; one after the other, each fills the GPU.

python docs/results/measure_llama.py [--variants bf16:none fp8:none] [--steps 8]

A variant is a precision and what is recomputed: none, full, or every (second block).
"""

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lockstep.config import Config, Fp8, load_config
from lockstep.config.shipped import find_config
from lockstep.data import Sampler, read_share
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.models import initial
from lockstep.training.prepare import load_data, prepare_strategy


@contextmanager
def made_on_the_gpu() -> Iterator[None]:
    """Initial weights: those of a GPU's generator, within seconds; the CPU's, which are the same on every machine, take
    minutes.
    """
    original = initial.initial_tensors

    def there(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
        made = original(model, seed)
        while True:
            with torch.device("cuda"):
                one = next(made, None)
            if one is None:
                return
            yield one

    with patch.object(initial, "initial_tensors", there):
        yield


def config_of(variant: str) -> Config:
    config = load_config(find_config("llama3_8b_fp8"))
    how: Any = config.train
    how.precision, _, how.recompute = variant.partition(":")
    return config if how.precision == "fp8" else replace(config, fp8=Fp8())


def measure(world: World, variants: list[str], steps: int) -> None:
    name = torch.cuda.get_device_name()
    print(f"Llama 3 8B, 8,192 tokens a step, {name}, torch {torch.__version__}; median of {steps}")
    print(f"{'variant':<14}{'ms':>9}{'tokens/s':>10}{'peak GiB':>10}{'ready s':>9}  loss")
    for variant in variants:
        begun = time.perf_counter()
        config = config_of(variant)
        try:
            with made_on_the_gpu():
                dataset = load_data(world, config)
                strategy = prepare_strategy(world, config, dataset)
            rows = next(iter(Sampler(len(dataset.train), config.train.batch_size, 0).epoch(0)))
            batch = read_share(dataset.train, rows, strategy.batch_share()).to(world.device)
            losses = [strategy.step(batch).loss for _ in range(3)]
            ready, seconds = time.perf_counter() - begun, []
            torch.cuda.reset_peak_memory_stats()
            for _ in range(steps):
                start = time.perf_counter()
                losses.append(strategy.step(batch).loss)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
        except torch.OutOfMemoryError as error:
            print(f"{variant:<14} does not fit: {str(error).splitlines()[0][:150]}", flush=True)
        else:
            took, peak = median(seconds), torch.cuda.max_memory_allocated() / 2**30
            print(
                f"{variant:<14}{1000 * took:>9.1f}{8192 / took:>10,.0f}{peak:>10.1f}{ready:>9.0f}  {losses[0]:.3f} to "
                f"{losses[-1]:.3f}",
                flush=True,
            )
        strategy = dataset = batch = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["bf16:none", "fp8:none", "bf16:every", "fp8:every"])
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    run_on_ranks(measure, given.variants, given.steps, launch=Launch(nproc=1, device="cuda", timeout=3600))
