"""All-reduces by their values, their messages and their bytes; and the two formulas."""

from math import ceil, log2
from typing import Any

import torch

from lockstep.learn.lessons.all_reduce import master as right
from lockstep.learn.rank import Rank
from lockstep.learn.recorder import RECEIVES, SENDS, Call

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
    formulas(rank)
    for elements in (12 * n, 11, 2):  # what the ranks divide, what they do not, and fewer than there are ranks
        values = rank.of_all(elements, seed=elements)
        total = torch.stack(values).sum(0)
        for name in ("naive", "tree"):
            mine = values[rank.rank].clone()
            with rank.recorder.during() as calls:
                getattr(rank.exercise, name)(mine)
            by_hand(rank, name, calls)
            mistakes = {"you took the mean: all-reduce gives the sum": total / n}
            rank.expect_tensor(f"{name}, {elements} elements", mine, total, mistakes)
            messages = sum(rank.gather(sum(call.operation in SENDS for call in calls)))
            rank.expect(
                messages == 2 * (n - 1),
                f"{name}: expected {2 * (n - 1)} messages in all (each rank but 0 sends once up, and gets one back), "
                f"got {messages}",
            )
            if name == "naive":
                others = [call.peer for call in calls if rank.rank and call.peer != 0]
                rank.expect(not others, f"naive: a message to or from rank {others[:1]}; all of them go by rank 0")
            else:
                deep, rounds = depth(rank.gather([(call.operation, call.peer) for call in calls])), ceil(log2(n))
                said = f"tree: its messages wait for one another {deep} deep; {rounds} rounds up and {rounds} down are"
                rank.expect(deep <= 2 * rounds, f"{said} {2 * rounds}")
        mine = values[rank.rank].clone()
        with rank.recorder.during() as calls:
            rank.exercise.ring(mine)
        by_hand(rank, "ring", calls)
        halves = mine.tensor_split(n)[(rank.rank + 1) % n]
        done = torch.allclose(halves, total.tensor_split(n)[(rank.rank + 1) % n])
        rest = bool(((mine - total).abs() > 1e-9).any())
        missing = "the second half is missing: each rank has one sum, and never passed it on (all-gather)"
        half_way = sum(call.operation in SENDS for call in calls) <= n - 1
        rank.agree(missing if done and rest and halves.numel() and half_way else None)
        rank.expect_tensor(f"ring, {elements} elements", mine, total, {"you took the mean, not the sum": total / n})
        sent = sum(call.sent for call in calls)
        most = 2 * (n - 1) * ceil(elements / n) * WIDTH
        rank.expect(
            sent <= most,
            f"ring: it sends the whole tensor in every turn: {sent:,.0f} B, where {2 * (n - 1)} chunks are {most:,} B",
        )
        peers = {call.peer for call in calls if call.operation in SENDS}
        rank.expect(len(peers) <= 1, f"ring: it sends to ranks {sorted(peers, key=str)}; a ring has one neighbour")
        count = sum(call.operation in SENDS for call in calls)
        rank.expect(count == 2 * (n - 1), f"ring: expected {2 * (n - 1)} messages from each rank, got {count}")

    if n == RANKS:
        mine = rank.random(NUMBERS)
        with rank.recorder.during() as calls:
            rank.exercise.ring(mine)
        rank.guess("PREDICTED_BYTES", sum(call.sent for call in calls))
        where = right.crossing(64, 1e-5, 1e10)
        rank.note(f"on 64 ranks with 10 us and 10 GB/s the ring is faster from {where / 1e6:.2f} MB on")


def formulas(rank: Rank) -> None:
    for ranks, nbytes, latency, bandwidth in ((4, 1e6, 1e-5, 1e9), (13, 3e4, 2e-6, 5e10)):
        for name in ("ring_seconds", "tree_seconds", "crossing"):
            given = (ranks, latency, bandwidth) if name == "crossing" else (ranks, nbytes, latency, bandwidth)
            words = ", ".join(f"{value:g}" for value in given)
            rank.expect_number(f"{name}({words})", getattr(rank.exercise, name)(*given), getattr(right, name)(*given))


def by_hand(rank: Rank, name: str, calls: list[Call]) -> None:
    other = next((call for call in calls if call.operation not in (*SENDS, *RECEIVES)), None)
    said = f"{name}: by hand, of messages between two ranks; {other.operation if other else ''} was called"
    rank.expect(other is None, f"{said} in line {other.line if other else 0}")


def depth(calls: list[list[tuple[str, int]]]) -> int:
    """How many messages follow one another, if each takes one turn, and ranks wait for what they send and receive."""
    todo, clocks = [list(mine) for mine in calls], [0] * len(calls)
    while any(todo):
        pair = next(
            ((a, mine[0][1]) for a, mine in enumerate(todo)
             if mine and mine[0][0] in SENDS and todo[mine[0][1]][:1] and todo[mine[0][1]][0][1] == a),
            None,
        )  # fmt: skip
        if pair is None:
            return 0  # sent ahead of time, or received in another order: nothing to be said of it
        turn = 1 + max(clocks[rank] for rank in pair)
        for rank in pair:
            clocks[rank] = turn
            todo[rank].pop(0)
    return max(clocks)


def explain(logs: list[list[dict[str, Any]]]) -> str | None:
    """What the messages of ranks that hung show."""
    last = [log[-1] for log in logs if log]
    if len(last) == len(logs) and all(row["op"] == "send" for row in last) and len({row["line"] for row in last}) == 1:
        return "every rank sends first, and no rank receives: send and receive at once (exchange)"
    sends = [[row["peer"] for row in log if row["op"] == "isend"][-1:] for log in logs]
    peers = [peer[0] for peer in sends if peer]
    if len(peers) == len(logs) and len(set(peers)) < len(peers):
        return "each rank sends to the same neighbour: the right one is (rank + 1) % size, another for each"
    return None
