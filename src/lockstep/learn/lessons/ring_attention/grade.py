"""Blocks, merges and the ring, against one softmax over everything."""

from math import inf, sqrt

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
    rank.expect_tensor("merge of two blocks: the output", exercise.merge(first, second)[0], expected[4:], mean)

    n = rank.size
    length = POSITIONS // n
    q, k, v = (20 * rank.same(POSITIONS, WIDTH, seed=seed) for seed in (4, 5, 6))  # scores that overflow without care
    expected = whole(q, k, v)
    mine = slice(rank.rank * length, (rank.rank + 1) * length)
    with rank.recorder.during() as calls:
        got = exercise.ring_attention(q[mine], k[mine], v[mine])
    turns = sum(call.operation in SENDS for call in calls)
    short = turns < n - 1
    rank.expect(not short, f"a rank has seen only some of the blocks: {turns + 1} of {n}; it takes size - 1 turns")
    rank.expect_tensor("ring_attention: the output", got, expected[mine])
    sent = sum(call.sent for call in calls)
    most = (n - 1) * 2 * length * WIDTH * NUMBER
    rank.expect(sent <= most, f"ring_attention sends {sent:,.0f} B; keys and values, n - 1 times, are {most:,} B")
    if n == RANKS:
        rank.guess("PREDICTED_BYTES", sent)
