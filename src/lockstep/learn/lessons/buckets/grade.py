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
        problem = f"assign({sizes}, {cap}): expected {wanted}, got {got}"
        each = [[index] for index in reversed(range(len(sizes)))]
        ahead = isinstance(got, list) and len(got) > 1 and 0 in got[0]
        names = {
            "a bucket may be exactly as large as the cap": got == right_buckets(sizes, cap - 1),
            "every gradient has a bucket of its own: fill each up to the cap": got == each,
            "buckets begin with the first layer, whose gradient comes last: nothing is ready early": ahead,
        }
        rank.agree(None if got == wanted else problem, next((name for name, true in names.items() if true), None))

    shapes = [(3, 4), (4,), (5, 4), (5,), (2, 5), (1,)]
    gradients = [rank.random(*shape, seed=i) for i, shape in enumerate(shapes)]
    own = [g.clone() for g in gradients]
    means = [torch.stack(rank.of_all(*shape, seed=i)).mean(0) for i, shape in enumerate(shapes)]
    buckets = right_buckets([g.nbytes for g in gradients], 120)
    given = list(gradients)
    with rank.recorder.during() as calls:
        rank.exercise.reduce(given, buckets)
    rank.expect(all(call.ended for call in calls), "an all-reduce was never waited for: it may come late")
    swapped = any(a is not b for a, b in zip(given, gradients, strict=True))
    rank.expect(not swapped, "you put new tensors into the list: the gradients themselves must change (copy_)")
    for index, (got, right) in enumerate(zip(gradients, means, strict=True)):
        mistakes = {
            "the sums never came back into the gradients: they stayed in the buckets": own[index],
            "you summed, the mean is missing": right * rank.size,
        }
        rank.expect_tensor(f"reduce: gradient {index}", got, right, mistakes)
    rank.expect_calls(calls, {"all_reduce": len(buckets)}, f"{len(calls)} messages for {len(buckets)} buckets")
    ended = [call.ended for call in calls]
    in_turn = all(before <= call.issued for before, call in zip(ended, calls[1:], strict=False))
    rank.expect(not in_turn, "it waits for each bucket before it starts the next: start all, then wait")

    for tries in (5, 3):
        times = {1: [9.0, 1.0, 9.0, 9.0, 9.0], 2: [50.0, 5.0, 5.0, 5.0, 5.0], 3: [6.0] * 5}
        asked = dict.fromkeys(times, 0)

        def timed(cap: int, asked: dict[int, int] = asked, times: dict[int, list[float]] = times) -> float:
            asked[cap] += 1
            return times[cap][(asked[cap] - 1) % 5]

        best = rank.exercise.best_cap([1, 2, 3], timed, tries)
        said = f"best_cap with {tries} tries: the caps were tried {list(asked.values())} times"
        rank.expect(set(asked.values()) == {tries}, said)
        rank.expect(best == 2, f"best_cap: expected the cap with the lowest median (2), got {best}")

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
