"""A model with every trap, on ranks that take different branches, against one process."""

import contextlib
import time
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.learn.lessons.hooks.grade import WIDTH as WIDE
from lockstep.learn.lessons.hooks.grade import Deep
from lockstep.learn.lessons.hooks.grade import overlaps as in_flight_during
from lockstep.learn.rank import Rank

WIDTH, ROWS, LR = 6, 4, 0.1


def facts() -> list[str]:
    """Numbers of the text."""
    return []


class Awkward(nn.Module):
    """A tied weight, a frozen layer, a buffer, a branch that not all samples take, and one that none does."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        h = torch.tanh(self.frozen(self.first(x))) * self.scale
        if branch:
            h = h + self.right(torch.tanh(self.left(h)))
        return self.last(h)


def made(seed: int, device: torch.device) -> Awkward:
    torch.manual_seed(seed)
    return Awkward().double().to(device)


def loss_of(model: Any, x: Tensor, branch: bool) -> Tensor:
    return (model(x, branch) ** 2).mean()


def grade(rank: Rank) -> None:
    mine, whole = made(10 + rank.rank, rank.device), made(10, rank.device)
    wrapped = rank.exercise.DistributedModel(mine)
    for (name, got), right in zip(named(mine).items(), named(whole).values(), strict=True):
        fixed = not getattr(got, "requires_grad", False)
        what = "a frozen parameter, or a buffer, was never broadcast" if fixed else "rank 0 never broadcast its weights"
        differs = bool(((got - right).abs() > 1e-12).any())
        rank.expect(not differs, f"{what}: {name} is not rank 0's")

    branches = [r % 2 == 0 for r in range(rank.size)]  # odd ranks never take it
    for step in range(2):
        shares = rank.of_all(ROWS, WIDTH, seed=step)
        whole.zero_grad()
        total = sum(loss_of(whole, x, taken) for x, taken in zip(shares, branches, strict=True))
        assert isinstance(total, Tensor)
        (total / rank.size).backward()
        wrapped.zero_grad()
        with rank.recorder.during() as calls:
            loss_of(wrapped, shares[rank.rank], branches[rank.rank]).backward()
            wrapped.finish()
        parameters = sum(1 for p in mine.parameters() if p.requires_grad)
        tied = len(calls) == parameters + 1
        rank.expect(not tied, "a tied parameter was reduced twice: it is one parameter, under two names")
        compare(rank, f"step {step}: the gradient", mine, whole)
        rank.expect_calls(calls, {"all_reduce": parameters})
    overlaps(rank)

    first, second = rank.of_all(ROWS, WIDTH, seed=7), rank.of_all(ROWS, WIDTH, seed=8)
    whole.zero_grad()
    losses = [loss_of(whole, x, taken) for x, taken in zip(first, branches, strict=True)]
    total = sum(losses + [loss_of(whole, x, False) for x in second])  # the branch is taken in the first one only
    assert isinstance(total, Tensor)
    (total / rank.size).backward()
    wrapped.zero_grad()
    with rank.recorder.during() as calls, wrapped.no_sync():
        loss_of(wrapped, first[rank.rank], branches[rank.rank]).backward()
    rank.expect(not calls, "no_sync was ignored: something was sent inside of it")
    loss_of(wrapped, second[rank.rank], False).backward()
    wrapped.finish()
    compare(rank, "two backwards, one step: the gradient", mine, whole)

    with contextlib.suppress(KeyError), wrapped.no_sync():
        raise KeyError
    wrapped.zero_grad()
    with rank.recorder.during() as calls:
        loss_of(wrapped, first[rank.rank], True).backward()
    wrapped.finish()
    rank.expect(bool(calls), "after an error inside of no_sync nothing is sent any more: set it back in a `finally`")


def overlaps(rank: Rank) -> None:
    """On ranks that all use everything, gradients are in flight while backward still runs."""
    torch.manual_seed(4)
    deep = Deep().to(rank.device)
    wrapped = rank.exercise.DistributedModel(deep)
    loss = (wrapped(rank.random(ROWS, WIDE)) ** 2).mean()
    with rank.recorder.during() as calls:
        loss.backward()
        ended = time.monotonic()
        wrapped.finish()
    in_flight_during(rank, calls, ended)


def compare(rank: Rank, what: str, mine: Awkward, whole: Awkward) -> None:
    """A parameter that no rank used may have a gradient of zeros, or none."""
    for name, right in whole.named_parameters():
        got = dict(mine.named_parameters())[name].grad
        expected = right.grad if right.grad is not None else torch.zeros_like(right)
        mistakes = {"you summed, the mean is missing": expected * rank.size}
        rank.expect_tensor(f"{what} of {name}", torch.zeros_like(right) if got is None else got, expected, mistakes)


def named(model: Awkward) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def explain(logs: list[list[dict[str, Any]]]) -> str | None:
    """Collectives of the same number that differ in size."""
    calls = [[(row["op"], row["elements"]) for row in log] for log in logs]
    for same in zip(*calls, strict=False):
        if len(set(same)) > 1:
            return "the ranks made their calls in different orders: whatever a rank uses, the order must be fixed"
    return None
