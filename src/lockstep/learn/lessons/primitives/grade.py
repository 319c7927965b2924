"""Each primitive by what every rank gets, and by what was called for it."""

import time
from typing import Any

import torch
from torch import nn

from lockstep.learn.rank import Rank


def facts() -> list[str]:
    """Numbers of the text."""
    return []


def explain(logs: list[list[dict[str, Any]]]) -> str | None:
    """What the calls of ranks that hung show."""
    if logs and all(log and log[-1]["op"] == "broadcast" and log[-1]["peer"] == rank for rank, log in enumerate(logs)):
        return "every rank broadcast from itself: `src` is the rank that all others get it from"
    return None


def grade(rank: Rank) -> None:
    exercise, size = rank.exercise, rank.size
    torch.manual_seed(5 + rank.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double().to(rank.device)
    firsts = [p.detach().clone() for p in model.parameters()]
    everybody = rank.gather([p.cpu() for p in firsts])
    with rank.recorder.during() as calls:
        exercise.start_alike(model)
    for (name, got), right, own in zip(model.named_parameters(), everybody[0], firsts, strict=True):
        came = any(call.operation == "broadcast" for call in calls)
        never = "rank 0 never broadcast its weights: this rank still has its own"
        copied = "the weights were broadcast, but not into this rank's parameters: into a copy of them?"
        mistakes = {copied if came else never: own}
        rank.expect_tensor(f"start_alike: {name}", got.data, right.to(rank.device), mistakes if rank.rank else {})
    rank.expect_calls(calls, {"broadcast": 4})

    rows = rank.same(size * 3, 2, seed=1)
    with rank.recorder.during() as calls:
        share = torch.zeros_like(rows[:3])
        exercise.deal(rows if rank.rank == 0 else None, share)
    rank.expect_tensor("deal: the share", share, rows[3 * rank.rank : 3 * rank.rank + 3])
    rank.expect_calls(calls, {"scatter": 1})

    value, values = rank.random(5, seed=2), rank.of_all(5, seed=2)
    with rank.recorder.during() as calls:
        collected = exercise.collect(value)
    rank.expect_calls(calls, {"gather": 1})
    if rank.rank == 0:
        listed = isinstance(collected, list) and len(collected) == size
        rank.expect(listed, f"collect: expected a list of {size} tensors on rank 0, got {type(collected).__name__}")
        rank.expect_tensor("collect: the values", torch.stack(list(collected)), torch.stack(values))
    else:
        rank.expect(collected is None, "collect: None was expected on ranks other than 0")
        rank.agree(None)

    with rank.recorder.during() as calls:
        got = exercise.everyone(value)
    same = {"all places are one and the same tensor: [t] * n is one t": torch.stack([values[-1]] * size)}
    rank.expect_tensor("everyone: the values", got, torch.stack(values), same)
    rank.expect_calls(calls, {"all_gather": 1})

    with rank.recorder.during() as calls:
        got = exercise.total(value)
    if rank.rank == 0:
        rank.expect_tensor("total: the sum", got, torch.stack(values).sum(0))
    else:
        rank.expect(got is None, "total: None was expected on ranks other than 0")
    rank.expect_tensor("total: the value that was given", value, values[rank.rank])
    rank.expect_calls(calls, {"reduce": 1})

    acted: list[float] = []

    def action() -> None:
        time.sleep(0.2 * (rank.rank == 0))
        acted.append(time.monotonic())

    with rank.recorder.during() as calls:
        exercise.first_then_others(action)
    rank.expect(len(acted) == 1, f"first_then_others: the action ran {len(acted)} times on this rank, not once")
    done = rank.gather(acted[0])
    rank.expect(done[rank.rank] >= done[0], f"first_then_others: rank {rank.rank} went ahead before rank 0 was done")
    rank.expect(bool(calls), "first_then_others: nothing was waited for: how does a rank know that rank 0 is done?")
