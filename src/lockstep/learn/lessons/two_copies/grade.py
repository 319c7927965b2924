"""Copies of one process, against the whole batch."""

import copy

import torch
from torch import nn

from lockstep.learn.rank import Rank

BATCH, STEPS, LR = 7, 3, 0.1


def facts() -> list[str]:
    """Numbers of the text."""
    return [f"batches of {BATCH}"]


def grade(rank: Rank) -> None:
    for rows, wanted in ((11, [4, 4, 3]), (7, [3, 2, 2])):
        pieces = [len(piece) for piece in rank.exercise.split(torch.arange(rows), 3)]
        rank.expect(pieces == wanted, f"split of {rows} rows in 3: expected pieces of {wanted}, got {pieces}")
    for copies in (2, 3):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)).double().to(rank.device)
        models = [copy.deepcopy(model) for _ in range(copies)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in models]
        whole = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(STEPS):
            x, y = rank.same(BATCH, 5, seed=10 + step), rank.same(BATCH, 5, seed=20 + step)
            before = copy.deepcopy(model)
            whole.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            whole.step()
            got = rank.exercise.step(models, optimizers, x, y)
            own = _stepped(before, x, y, copies, "own")
            mistakes = {
                "you summed, the mean is missing": _stepped(before, x, y, copies, "sum")[0],
                "each copy counts the same, whatever it has seen: weight by samples": _stepped(
                    before, x, y, copies, "mean"
                )[0],
            }
            for number, mine in enumerate(models):
                kept = {f"copy {number} kept its own gradient: it is the gradient of its own share": own[number]}
                what = f"{copies} copies, step {step}: copy {number}'s weight"
                rank.expect_model(what, mine, model, {**mistakes, **kept})
            rank.expect_tensor(f"step {step}: the loss", torch.tensor(got, dtype=torch.float64), loss.detach())


def _stepped(model: nn.Module, x: torch.Tensor, y: torch.Tensor, copies: int, mistake: str) -> list[nn.Module]:
    """Where each copy would be after a step with this mistake."""
    models = [copy.deepcopy(model) for _ in range(copies)]
    for mine, xs, ys in zip(models, x.tensor_split(copies), y.tensor_split(copies), strict=True):
        mine.zero_grad()
        ((mine(xs) - ys) ** 2).mean().backward()
    for same in zip(*(m.parameters() for m in models), strict=True):
        gradients = [p.grad.clone() for p in same if p.grad is not None]
        for number, parameter in enumerate(same):
            total = torch.stack(gradients).sum(0)
            parameter.grad = {"own": gradients[number], "sum": total, "mean": total / copies}[mistake]
    for mine in models:
        torch.optim.SGD(mine.parameters(), lr=LR).step()
    return models
