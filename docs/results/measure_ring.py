"""Ring attention on all ranks beside full attention on one, forward and backward, in turns, one core for each rank.

python docs/results/measure_ring.py --nproc 2 --tokens 8192
python docs/results/measure_ring.py --nproc 2 --tokens 32768 --share-gpu
"""

import argparse
import time
from statistics import median

import torch
import torch.nn.functional as F

from lockstep import ring_attention, shard_sequence, ulysses_attention
from lockstep.comm.hosts import hosts_meet
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World


def measure(world: World, tokens: int, heads: int, dim: int, rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    whole = [torch.randn(1, heads, tokens, dim, device=world.device, dtype=dtype).requires_grad_() for _ in range(3)]
    mine = [shard_sequence(t.detach(), 2).requires_grad_() for t in whole]

    def full() -> None:
        if world.is_main:
            F.scaled_dot_product_attention(*whole, is_causal=True).sum().backward()

    ways = {
        "one rank, full": full,
        "ring": lambda: ring_attention(*mine).sum().backward(),
        "ulysses": lambda: ulysses_attention(*mine).sum().backward(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, run in ways.items():
            hosts_meet(world.device)
            start = time.perf_counter()
            run()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            hosts_meet(world.device)
            if round_:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nproc", 2), ("tokens", 8192), ("heads", 8), ("dim", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default=None)
    parser.add_argument("--share-gpu", action="store_true", help="in bf16, on one GPU")
    given = parser.parse_args()
    device = "cuda" if given.share_gpu else "cpu"
    launch = Launch(nproc=given.nproc, device=device, backend=given.backend, share_gpu=given.share_gpu)
    found = run_on_ranks(measure, given.tokens, given.heads, given.dim, given.rounds, launch=launch, threads=1)[0]
    base = found["one rank, full"]
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(seconds, base, strict=True)]
        spread = f"{min(ratios):.3f} - {max(ratios):.3f}"
        print(f"{name:16} {1e3 * median(seconds):9.1f} ms   ratio {median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
