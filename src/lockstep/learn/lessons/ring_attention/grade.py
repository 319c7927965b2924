"""Blocks, merges and the ring, against one softmax over everything."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from lockstep.learn.rank import Rank
from lockstep.learn.recorder import SENDS

POSITIONS, WIDTH, NUMBER, RANKS = 12, 8, 8, 3


def facts() -> list[str]:
    """Numbers of the text."""
    return [
        f"sequence of {POSITIONS} positions in all, with keys and values of width {WIDTH} of {NUMBER} bytes a number "
        f"on {RANKS} ranks",
        "log(exp(lse1) + exp(lse2))",
        "exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2",
    ]


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.T / sqrt(q.shape[1])
    later = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -inf).softmax(-1) @ v


def wrong_owners(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
    """Where rank r takes the block of turn t for that of rank r + t."""
    length, rows = len(q) // n, []
    for r in range(n):
        places = torch.cat([torch.arange(length) + ((r + t) % n) * length for t in range(n)])
        content = torch.cat([torch.arange(length) + ((r - t) % n) * length for t in range(n)])
        mine = torch.arange(length) + r * length
        later = (places > mine[:, None]).to(q.device)
        scores = q[mine] @ k[content].T / sqrt(q.shape[1])
        rows.append(scores.masked_fill(later, -inf).softmax(-1) @ v[content])
    return torch.cat(rows)


@contextmanager
def noted(exercise: Any) -> Iterator[dict[str, list[int]]]:
    """How many keys each call of `block` got, and the calls of `merge`."""
    seen: dict[str, list[int]] = {"block": [], "merge": []}
    block, merge = exercise.block, exercise.merge

    def noting_block(q: Tensor, k: Tensor, *rest: Any) -> Any:
        seen["block"].append(len(k))
        return block(q, k, *rest)

    def noting_merge(*parts: Any) -> Any:
        seen["merge"].append(len(parts))
        return merge(*parts)

    exercise.block, exercise.merge = noting_block, noting_merge
    try:
        yield seen
    finally:
        exercise.block, exercise.merge = block, merge


def grade(rank: Rank) -> None:
    exercise = rank.exercise
    q, k, v = (rank.same(7, 4, seed=seed) for seed in (1, 2, 3))
    expected = whole(q, k, v)
    out, lse = exercise.block(q, k, v, 0, 0)
    rank.expect_tensor("block of everything: the output", out, expected)
    scores = (q @ k.T / 2).masked_fill(torch.ones(7, 7, dtype=torch.bool, device=q.device).triu(1), -inf)
    rank.expect_tensor("block of everything: lse", lse, scores.logsumexp(-1))
    first, second = exercise.block(q[4:], k[:4], v[:4], 4, 0), exercise.block(q[4:], k[4:], v[4:], 4, 4)
    wrong = "the mask goes by places in the block: it must go by positions in the whole sequence"
    seen = bool(torch.allclose(first[0][0], v[0]))  # by the first of them: one key, where there are four
    rank.expect(not seen, wrong)
    mean = {"blocks were averaged: weigh each by exp(lse - lse of both)": (first[0] + second[0]) / 2}
    merged = exercise.merge(first, second)
    rank.expect_tensor("merge of two blocks: the output", merged[0], expected[4:], mean)
    larger = {"that is the larger of both: their exponentials add up": torch.maximum(first[1], second[1])}
    rank.expect_tensor("merge of two blocks: lse", merged[1], scores[4:].logsumexp(-1), larger)
    unseen = exercise.block(q[:3], k[4:], v[4:], 0, 4)[0]
    said = "block: queries that see none of the keys: their weights are 0, and not nan"
    rank.expect(not bool(unseen.isnan().any()), said)

    n = rank.size
    length = POSITIONS // n
    mine = slice(rank.rank * length, (rank.rank + 1) * length)
    for scale in (1, 20):  # scores that overflow without care
        q, k, v = (scale * rank.same(POSITIONS, WIDTH, seed=seed) for seed in (4, 5, 6))
        expected = whole(q, k, v)
        with rank.recorder.during() as calls, noted(exercise) as given:
            got = exercise.ring_attention(q[mine], k[mine], v[mine])
        gathers = any(call.operation.startswith("all_gather") for call in calls)
        rank.expect(
            not gathers, "all keys and values were gathered at once: that is what does not fit; pass them round"
        )
        turns = sum(call.operation in SENDS for call in calls)
        short = turns < n - 1
        rank.expect(not short, f"a rank has seen only some of the blocks: {turns + 1} of {n}; it takes size - 1 turns")
        collects = max(given["block"], default=0) > length or (rank.rank == n - 1 and not given["merge"])
        rank.expect(
            not collects, "the blocks were kept, and attended to together: merge each as it comes, and let it go"
        )
        owner = {"whose block is it? In turn t it is that of rank - t": wrong_owners(q, k, v, n)[mine]}
        rank.expect_tensor("ring_attention: the output", got, expected[mine], owner)
    sent = sum(call.sent for call in calls)
    most = (n - 1) * 2 * length * WIDTH * NUMBER
    rank.expect(sent <= most, f"ring_attention sends {sent:,.0f} B; keys and values, n - 1 times, are {most:,} B")
    if n == RANKS:
        rank.guess("PREDICTED_BYTES", sent)
