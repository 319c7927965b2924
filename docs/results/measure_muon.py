"""Steps and seconds that Muon needs for AdamW's loss: a small GPT on the sources of Python's standard library.

python docs/results/measure_muon.py [--steps 400] [--seeds 5] [--rates 1e-3 2e-3 4e-3 8e-3] [--d-model 128] [--layers 4]
python docs/results/measure_muon.py --device cuda --d-model 768 --layers 12 --heads 12 --batch 64 --context 256

1. both optimizers train with each learning rate, with the first seed: the one with the lowest test loss is taken
2. with it, both train with each seed; the loss to be reached is AdamW's after its last step, seed by seed
3. printed: the share of AdamW's steps after which Muon has that loss, and of its time, with 95% intervals over seeds

The rate is constant after a warm-up, so that a run's losses do not depend on how long it would have gone on. With
--decay it falls to zero at the end, as one trains in earnest, and Muon trains several times, with fewer steps each; how
many it needs is read between the two whose losses are next to AdamW's.
"""

import argparse
import random
import time
from itertools import pairwise
from statistics import mean

import torch

from lockstep.config import GPT, Config, Data, Parallel, Train
from lockstep.data import DataSet, Reader
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.training.evaluate import evaluate
from lockstep.training.prepare import load_data, prepare_strategy

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of AdamW's steps, that Muon takes where the rate decays."""
EVERY, BATCHES = 10, 8
"""Steps between evaluations, and batches of each."""
DRAWS = 10_000


def curve(
    world: World, config: Config, dataset: DataSet, steps: int, decays: bool = False
) -> list[tuple[int, float, float]]:
    """(step, seconds of training, test loss) every few steps; where the rate decays, at the end."""
    strategy = prepare_strategy(world, config, dataset)
    reader = Reader(dataset.train, config.train.batch_size, config.train.seed, strategy.batch_share())
    found, spent, step, epoch = [], 0.0, 0, 0
    while step < steps:
        for _, batch in reader.epoch(epoch):
            rate = config.train.lr * min(1.0, (step + 1) / config.train.warmup_steps)
            rate *= 1 - step / steps if decays else 1
            strategy.set_learning_rate(rate)
            start = time.perf_counter()
            strategy.step(batch.to(world.device))
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            spent += time.perf_counter() - start
            step += 1
            if step == steps if decays else step % EVERY == 0:
                batches = BATCHES * (4 if decays else 1)
                tested = evaluate(strategy, dataset.test, config.train.batch_size, batches)
                assert tested is not None, "nothing has asked it to stop"
                found.append((step, spent, tested[0]))
            if step == steps:
                break
        epoch += 1
    return found


def between(points: list[tuple[int, float, float]], loss: float) -> tuple[float, float]:
    """(steps, seconds) at which a loss would be reached, on the line between two points; no extrapolation."""
    for (steps, seconds, above), (more, longer, below) in pairwise(points):
        if above >= loss >= below:
            share = (above - loss) / (above - below)
            return steps + share * (more - steps), seconds + share * (longer - seconds)
    return points[0][:2] if points[0][2] <= loss else points[-1][:2]


def interval(ratios: list[float]) -> tuple[float, float]:
    """95%, of their mean, by drawing seeds anew."""
    draws = random.Random(0)
    means = sorted(mean(draws.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return means[int(0.025 * DRAWS)], means[int(0.975 * DRAWS)]


def main() -> None:
    args = arguments()
    run_on_ranks(measure, args, launch=Launch(nproc=1, device=args.device, timeout=3600))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3])
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--decay", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser.parse_args()


def measure(world: World, args: argparse.Namespace) -> None:
    on_gpu = world.device.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    model = GPT(
        d_model=args.d_model,
        layers=args.layers,
        heads=args.heads,
        context=args.context,
        residual="compute" if on_gpu else "fp32",
        **{"norm": "rmsnorm", "position": "rope", "activation": "swiglu"},  # type: ignore[arg-type]
    )

    def config(optimizer: str, rate: float, seed: int) -> Config:
        train = Train(batch_size=args.batch, optimizer=optimizer, lr=rate, seed=seed, warmup_steps=20, clip_norm=1.0)
        train.weight_decay = 0.01
        train.precision, train.compile = ("bf16", "blocks") if on_gpu else ("fp32", "none")
        return Config(model, Data("text", max_bytes=20_000_000 if on_gpu else 2_000_000), train, Parallel("single"))

    dataset = load_data(world, config("adamw", 1e-3, 0))
    best: dict[str, float] = {}
    for optimizer in ("adamw", "muon"):
        losses = {}
        for rate in args.rates:
            losses[rate] = curve(world, config(optimizer, rate, 0), dataset, args.steps, args.decay)[-1][2]
        best[optimizer] = min(losses, key=lambda rate: losses[rate])
        listed = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items())
        print(f"{optimizer:<6} test loss after {args.steps} steps by rate: {listed}", flush=True)
    steps, seconds = [], []
    for seed in range(1, args.seeds + 1):
        goal = curve(world, config("adamw", best["adamw"], seed), dataset, args.steps, args.decay)[-1]
        muon = []
        for share in SHARES if args.decay else (1.0,):
            muon += curve(world, config("muon", best["muon"], seed), dataset, int(share * args.steps), args.decay)
        count: float
        if args.decay:
            count, spent = between(muon, goal[2])
            listed = ", ".join(f"{loss:.4f} ({taken})" for taken, _, loss in muon)
            print(f"seed {seed}: AdamW {goal[2]:.4f} ({goal[0]} steps); Muon {listed}", flush=True)
        else:
            count, spent, loss = next((point for point in muon if point[2] <= goal[2]), muon[-1])
            print(
                f"seed {seed}: AdamW {goal[2]:.4f} after {goal[0]} steps, {goal[1]:.0f} s; Muon {loss:.4f} after "
                f"{count}, {spent:.0f} s, and {muon[-1][2]:.4f} after {muon[-1][0]}",
                flush=True,
            )
        steps.append(count / goal[0])
        seconds.append(spent / goal[1])
    for what, ratios in (("steps", steps), ("seconds", seconds)):
        low, high = interval(ratios)
        print(f"{what} to AdamW's loss, Muon over AdamW: {mean(ratios):.3f} (95%: {low:.3f} - {high:.3f})")


if __name__ == "__main__":
    main()
