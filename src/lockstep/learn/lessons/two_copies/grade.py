"""Copies of one process, against the whole batch."""

import copy
from functools import partial

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
    for counts in ([4, 3], [5, 1, 1]):
        averages(rank, counts)
    for copies in (2, 3):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)).double().to(rank.device)
        models = [copy.deepcopy(model) for _ in range(copies)]
        seen = [0] * copies
        for number, mine in enumerate(models):
            mine.register_forward_pre_hook(partial(count, seen, number))
        optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in models]
        whole = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(STEPS):
            x, y = rank.same(BATCH, 5, seed=10 + step), rank.same(BATCH, 5, seed=20 + step)
            before = copy.deepcopy(model)
            added = copy.deepcopy(model)
            ((added(x) - y) ** 2).mean().backward()
            for parameter, old in zip(added.parameters(), model.parameters(), strict=True):
                assert parameter.grad is not None
                parameter.grad += 0 if old.grad is None else old.grad
            torch.optim.SGD(added.parameters(), lr=LR).step()
            whole.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            whole.step()
            seen[:] = [0] * copies
            got = rank.exercise.step(models, optimizers, x, y)
            shares = [len(share) for share in x.tensor_split(copies)]
            rank.expect(seen == shares, f"step: the copies computed {seen} samples, where their shares are {shares}")
            own = _stepped(before, x, y, copies, "own")
            mistakes = {
                "gradients of the step before were not cleared: zero_grad comes before backward": added,
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


def averages(rank: Rank, counts: list[int]) -> None:
    """By itself, on gradients that no backward has computed."""
    models = [nn.Linear(3, 2).double().to(rank.device) for _ in counts]
    for number, model in enumerate(models):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = rank.same(*parameter.shape, seed=40 + 10 * index + number)
    rank.exercise.average_gradients(models, counts)
    for index, parameter in enumerate(models[0].parameters()):
        given = [rank.same(*parameter.shape, seed=40 + 10 * index + number) for number in range(len(counts))]
        weighted = torch.stack([n * g for n, g in zip(counts, given, strict=True)]).sum(0)
        mistakes = {
            "you summed, the mean is missing": torch.stack(given).sum(0),
            "each copy counts the same, whatever it has seen: weight by samples": torch.stack(given).mean(0),
            "the weighted gradients were not divided by all samples": weighted,
        }
        for number, model in enumerate(models):
            kept = {f"copy {number} kept its own gradient: it is the gradient of its own share": given[number]}
            what = f"average_gradients with counts {counts}: copy {number}'s gradient"
            got = list(model.parameters())[index].grad
            rank.expect_tensor(what, got, weighted / sum(counts), {**mistakes, **kept})


def count(seen: list[int], number: int, _: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    seen[number] += len(given[0])


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
