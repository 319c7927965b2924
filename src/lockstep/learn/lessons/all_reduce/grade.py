"""All-reduces by their values, their messages and their bytes; and the two formulas."""

from math import ceil, log2
from typing import Any

import torch

from lockstep.learn.rank import Rank
from lockstep.learn.recorder import SENDS

NUMBERS, WIDTH, RANKS = 1000, 8, 4


def facts() -> list[str]:
    """Numbers of the text."""
    ring = "2(n-1)"  # held against what is counted
    return [
        f"all-reduce of {NUMBERS:,} numbers of {WIDTH} bytes over {RANKS} ranks",
        f"{ring} chunks of 1/n",
        f"{ring}/n of its size",
        f"{ring} messages",
    ]


def grade(rank: Rank) -> None:
    n = rank.size
    for elements in (12 * n, 11, 2):  # what the ranks divide, what they do not, and fewer than there are ranks
        values = rank.of_all(elements, seed=elements)
        total = torch.stack(values).sum(0)
        for name in ("naive", "tree"):
            mine = values[rank.rank].clone()
            with rank.recorder.during() as calls:
                getattr(rank.exercise, name)(mine)
            rank.expect_tensor(f"{name}, {elements} elements", mine, total)
            messages = sum(rank.gather(sum(call.operation in SENDS for call in calls)))
            rank.expect(messages == 2 * (n - 1), f"{name}: expected {2 * (n - 1)} messages in all, got {messages}")
            most = 2 * ceil(log2(n)) if name == "tree" else 2 * (n - 1)
            rank.expect(len(calls) <= most, f"{name}: a rank sends and receives {len(calls)} times; {most} are enough")
        mine = values[rank.rank].clone()
        with rank.recorder.during() as calls:
            rank.exercise.ring(mine)
        halves = mine.tensor_split(n)[(rank.rank + 1) % n]
        done = torch.allclose(halves, total.tensor_split(n)[(rank.rank + 1) % n])
        rest = bool(((mine - total).abs() > 1e-9).any())
        missing = "the second half is missing: each rank has one sum, and never passed it on (all-gather)"
        half_way = sum(call.operation in SENDS for call in calls) <= n - 1
        rank.agree(missing if done and rest and halves.numel() and half_way else None)
        rank.expect_tensor(f"ring, {elements} elements", mine, total)
        sent = sum(call.sent for call in calls)
        most = 2 * (n - 1) * ceil(elements / n) * WIDTH
        rank.expect(
            sent <= most, f"ring: it sends the whole tensor in every turn: {sent:,.0f} B, where chunks are {most:,} B"
        )
        count = sum(call.operation in SENDS for call in calls)
        rank.expect(count == 2 * (n - 1), f"ring: expected {2 * (n - 1)} messages from each rank, got {count}")

    for ranks, nbytes, latency, bandwidth in ((4, 1e6, 1e-5, 1e9), (13, 3e4, 2e-6, 5e10)):
        step = latency + nbytes / ranks / bandwidth
        formula(rank, "ring_seconds", (ranks, nbytes, latency, bandwidth), 2 * (ranks - 1) * step)
        whole = 2 * ceil(log2(ranks)) * (latency + nbytes / bandwidth)
        formula(rank, "tree_seconds", (ranks, nbytes, latency, bandwidth), whole)
        rounds = ceil(log2(ranks))
        where = latency * bandwidth * (ranks - 1 - rounds) / (rounds - (ranks - 1) / ranks)
        formula(rank, "crossing", (ranks, latency, bandwidth), where)

    if n == RANKS:
        mine = rank.random(NUMBERS)
        with rank.recorder.during() as calls:
            rank.exercise.ring(mine)
        rank.guess("PREDICTED_BYTES", sum(call.sent for call in calls))
        rank.note(
            f"on 64 ranks with 10 us and 10 GB/s the ring is faster from {_crossing(64, 1e-5, 1e10) / 1e6:.2f} MB on"
        )


def formula(rank: Rank, name: str, given: tuple[float, ...], expected: float) -> None:
    got = getattr(rank.exercise, name)(*given)
    words = ", ".join(f"{value:g}" for value in given)
    rank.expect(abs(got - expected) <= 1e-9 * expected, f"{name}({words}): expected {expected:.6g}, got {got:.6g}")


def _crossing(ranks: int, latency: float, bandwidth: float) -> float:
    rounds = ceil(log2(ranks))
    return latency * bandwidth * (ranks - 1 - rounds) / (rounds - (ranks - 1) / ranks)


def explain(logs: list[list[dict[str, Any]]]) -> str | None:
    """What the messages of ranks that hung show."""
    last = [log[-1] for log in logs if log]
    if len(last) == len(logs) and all(row["op"] == "send" for row in last) and len({row["line"] for row in last}) == 1:
        return "every rank sends first, and nobody receives: send and receive at once (exchange)"
    sends = [[row["peer"] for row in log if row["op"] == "isend"][-1:] for log in logs]
    peers = [peer[0] for peer in sends if peer]
    if len(peers) == len(logs) and len(set(peers)) < len(peers):
        return "each rank sends to the same neighbour: the right one is (rank + 1) % size, another for each"
    return None
