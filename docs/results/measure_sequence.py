"""Sequence parallelism with its messages hidden behind products, and without: two transformer blocks, in turns.

python docs/results/measure_sequence.py --nproc 2 --share-gpu
"""

import argparse
import time
from statistics import median

import torch
from torch import nn

from lockstep import tensor_parallel
from lockstep.comm.hosts import hosts_meet
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.models.gpt import Positions, Shape, TransformerBlock
from lockstep.parallel.tensor import parallel_products

PLAN = {"0": "vocab", "*.qkv": "column", "*.output": "row", "*.up": "column", "*.down": "row"}
TOGETHER = parallel_products.halves


def measure(world: World, width: int, tokens: int, rows: int, rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    shape = Shape(width, 1, width // 64, width // 64, tokens, 256)
    row = nn.Sequential(
        nn.Embedding(256, width), TransformerBlock(shape, Positions()), TransformerBlock(shape, Positions())
    )
    model: nn.Module = tensor_parallel(row, PLAN, sequence_parallel=True).to(world.device, dtype)
    x = torch.randint(256, (rows, tokens), device=world.device)
    ways = {"one message at a time": lambda x: (x,), "in halves": TOGETHER}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 2):
        for name, halves in ways.items():
            parallel_products.halves = halves
            hosts_meet(world.device)
            start = time.perf_counter()
            for _ in range(4):
                model(x).sum().backward()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            hosts_meet(world.device)
            if round_ > 1:  # the first two warm up
                seconds[name].append((time.perf_counter() - start) / 4)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nproc", 2), ("width", 4096), ("tokens", 2048), ("rows", 4), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--share-gpu", action="store_true")
    given = parser.parse_args()
    launch = Launch(nproc=given.nproc, device="cuda" if given.share_gpu else "cpu", share_gpu=given.share_gpu)
    sizes = (given.width, given.tokens, given.rows, given.rounds)
    found = run_on_ranks(measure, *sizes, launch=launch)[0]
    base = found["one message at a time"]
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(seconds, base, strict=True)]
        spread = f"{min(ratios):.3f} - {max(ratios):.3f}"
        print(f"{name:22} {1e3 * median(seconds):8.2f} ms   ratio {median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
