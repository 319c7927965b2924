"""Gradients by their values, and all-reduces by when they were issued and waited for."""

import copy
import time
from statistics import median
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.learn.rank import Rank
from lockstep.learn.recorder import Call

LAYERS, WIDTH, PAUSE, TURNS = 5, 8, 0.02, 5


def facts() -> list[str]:
    """Numbers of the text."""
    return []


class Slowly(torch.autograd.Function):
    """Nothing, whose backward takes a while, and is noted."""

    began: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Slowly.began.append(time.monotonic())
        time.sleep(PAUSE)
        return gradient


class Deep(nn.Module):
    """Linear layers, each followed by one whose backward takes a while."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS)).double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Slowly.apply(torch.tanh(layer(x)))
        return x


def grade(rank: Rank) -> None:
    torch.manual_seed(2)
    model = Deep().to(rank.device)
    whole, mine = copy.deepcopy(model), copy.deepcopy(model)
    overlapped = rank.exercise.Overlapped(mine)
    for step in range(2):
        shares = rank.of_all(4, WIDTH, seed=step)
        whole.zero_grad()
        (whole(torch.cat(shares)) ** 2).mean().backward()
        summed = copy.deepcopy(whole)
        for p, q in zip(summed.parameters(), whole.parameters(), strict=True):
            assert q.grad is not None
            p.grad = q.grad * rank.size
        mine.zero_grad()
        loss = (mine(shares[rank.rank]) ** 2).mean()
        with rank.recorder.during() as calls:
            loss.backward()
            ended = time.monotonic()
            overlapped.finish()
        rank.expect(bool(calls), "no all-reduce was made: is the hook registered, and does it start one?")
        overlaps(rank, calls, ended)
        unwaited = [call for call in calls if not call.ended]
        rank.expect(
            not unwaited,
            f"an all-reduce of {unwaited[0].elements if unwaited else 0} was never waited for: it may come late",
        )
        rank.expect_model(
            f"step {step}: the gradient", mine, whole, {"you summed, the mean is missing": summed}, grad=True
        )
        rank.expect_calls(calls, {"all_reduce": 2 * LAYERS})
    measure(rank)


def overlaps(rank: Rank, calls: list[Call], ended: float) -> None:
    """All-reduces were in flight while backward ran, and it did not stand still for them."""
    early = [call for call in calls if call.issued < ended]
    rank.expect(
        len(early) > 0.5 * len(calls),
        "nothing was in flight while backward ran: the all-reduces began after it. A hook starts them in time",
    )
    stood = [call for call in early if 0 < call.ended < ended]
    rank.expect(not stood, "you waited inside the hook: nothing overlaps. Start it there, and wait in finish()")
    before_the_last = [call for call in early if call.issued < Slowly.began[-1]]
    rank.expect(
        len(before_the_last) > 0.5 * len(early),
        "the all-reduces all began when the last gradient had come: each can start as soon as its own is complete",
    )


def measure(rank: Rank) -> None:
    """What is hidden, of messages that take a while."""
    model = Deep(400).to(rank.device)
    overlapped = rank.exercise.Overlapped(model)
    x = rank.random(4, 400)
    (model(x) ** 2).mean().backward()
    overlapped.finish()
    exposed, afterwards = list[float](), list[float]()
    for _ in range(TURNS):
        (model(x) ** 2).mean().backward()
        start = time.perf_counter()
        overlapped.finish()
        exposed.append(time.perf_counter() - start)
        with rank.recorder.off():
            dist.barrier()
            start = time.perf_counter()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            afterwards.append(time.perf_counter() - start)
    waits, took = median(exposed), median(afterwards)
    hidden = max(0.0, 1 - waits / took)
    busy = " (little: is the machine busy with other things?)" if hidden < 0.1 else ""
    rank.note(
        f"all-reduces after backward take {1e3 * took:.1f} ms; from hooks the step waits {1e3 * waits:.1f} ms: "
        f"{hidden:.0%} hidden{busy}"
    )
