"""Buckets by what is in them, by their messages, and by the means that come out."""

import time

import torch
from torch import nn

from lockstep.learn.lessons.buckets.master import assign as right_buckets
from lockstep.learn.rank import Rank

LAYERS, WIDTH, NUMBER, CAP = 16, 64, 8, 100_000


def facts() -> list[str]:
    """Numbers of the text."""
    return [
        f"{LAYERS} linear layers of width {WIDTH}, with biases, of {NUMBER} bytes a number, and a cap of {CAP:,} bytes",
        f"A layer's bias has {WIDTH} numbers",
        f"a cap of {default_cap_mib()} MiB",
    ]


def default_cap_mib() -> int:
    """PyTorch's own."""
    import inspect

    from torch.nn.parallel import DistributedDataParallel, distributed

    given = inspect.signature(DistributedDataParallel.__init__).parameters["bucket_cap_mb"].default
    return int(given if given is not None else getattr(distributed, "_DEFAULT_BUCKET_CAP_MB", 25))


def grade(rank: Rank) -> None:
    for sizes, cap in (([80, 8, 80, 8, 300, 8, 16], 100), ([5, 5, 5, 5], 10), ([50], 1)):
        got, wanted = rank.exercise.assign(sizes, cap), right_buckets(sizes, cap)
        each = got == [[index] for index in reversed(range(len(sizes)))] != wanted
        rank.expect(not each, "every gradient has a bucket of its own: fill each up to the cap")
        ahead = bool(got) and len(got) > 1 and 0 in got[0]
        rank.expect(not ahead, "buckets begin with the first layer, whose gradient comes last: nothing is ready early")
        rank.expect(got == wanted, f"assign({sizes}, {cap}): expected {wanted}, got {got}")

    shapes = [(3, 4), (4,), (5, 4), (5,), (2, 5), (1,)]
    gradients = [rank.random(*shape, seed=i) for i, shape in enumerate(shapes)]
    own = [g.clone() for g in gradients]
    means = [torch.stack(rank.of_all(*shape, seed=i)).mean(0) for i, shape in enumerate(shapes)]
    buckets = right_buckets([g.nbytes for g in gradients], 120)
    with rank.recorder.during() as calls:
        rank.exercise.reduce(gradients, buckets)
    for index, (got, right) in enumerate(zip(gradients, means, strict=True)):
        mistakes = {
            "the sums never came back into the gradients: they stayed in the buckets": own[index],
            "you summed, the mean is missing": right * rank.size,
        }
        rank.expect_tensor(f"reduce: gradient {index}", got, right, mistakes)
    rank.expect_calls(calls, {"all_reduce": len(buckets)})
    rank.expect(all(call.ended for call in calls), "an all-reduce was never waited for: it may come late")
    ended = [call.ended for call in calls]
    in_turn = all(before <= call.issued for before, call in zip(ended, calls[1:], strict=False))
    rank.expect(not in_turn, "it waits for each bucket before it starts the next: start all, then wait")

    times = {1: iter([9.0, 1.0, 9.0, 9.0, 9.0]), 2: iter([5.0, 5.0, 5.0, 5.0, 50.0]), 3: iter([6.0] * 5)}
    got = rank.exercise.best_cap([1, 2, 3], lambda cap: next(times[cap]), 5)
    rank.expect(got == 2, f"best_cap: expected the cap with the lowest median (2), got {got}")

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).double().to(rank.device)
    grads = [torch.ones_like(p) for p in model.parameters()]
    sizes = [g.nbytes for g in grads]
    with rank.recorder.during() as calls:
        rank.exercise.reduce(grads, rank.exercise.assign(sizes, CAP))
    rank.guess("PREDICTED_MESSAGES", len(calls))

    def seconds(cap: int) -> float:
        start = time.perf_counter()
        rank.exercise.reduce(grads, right_buckets(sizes, cap))
        return time.perf_counter() - start

    medians = {cap: sorted(seconds(cap) for _ in range(5))[2] for cap in (1, 50_000, 200_000, sum(sizes))}
    words = ", ".join(f"{cap:,} B {1e3 * t:.2f} ms" for cap, t in medians.items())
    rank.note(f"here, without overlap, by cap: {words}")
