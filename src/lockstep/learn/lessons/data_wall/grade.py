"""The plain loop against ours, on a number of samples that the batch does not divide."""

import copy
import time

import torch
from torch import Tensor, nn

from lockstep.learn.rank import Rank
from lockstep.words import duration

LAYERS, WIDTH, SAMPLES, BATCH, LR = 16, 64, 103, 16, 0.05
MILLION = 1_000_000


def facts() -> list[str]:
    """Numbers of the text."""
    return [f"{LAYERS} layers of width {WIDTH}"]


def order(names: list[str]) -> str:
    return f"{', '.join(names[:3])}, ... {', '.join(names[-2:])} ({len(names)} in all)"


def reference(model: nn.Module, inputs: Tensor, targets: Tensor, mistake: str = "") -> list[float]:
    """The loop, and what it becomes with each known mistake."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for begin in range(0, len(inputs), BATCH):
        x, y = inputs[begin : begin + BATCH], targets[begin : begin + BATCH]
        if mistake == "first":
            optimizer.step()
        loss = ((model(x) - y) ** 2).mean()
        if mistake != "adds":
            optimizer.zero_grad()
        (loss * (y.numel() if mistake == "sum" else 1)).backward()
        if mistake == "clears":
            optimizer.zero_grad(set_to_none=False)
        if mistake != "first":
            optimizer.step()
        losses.append(loss.item())
    return losses


def grade(rank: Rank) -> None:
    torch.manual_seed(7)
    built = rank.exercise.build_model(WIDTH, LAYERS)
    rank.expect(isinstance(built, nn.Module), f"build_model: expected a module, got {type(built).__name__}")
    parts = [m for m in built.modules() if not list(m.children())]
    linear = [m for m in parts if isinstance(m, nn.Linear)]
    rank.expect(len(linear) == LAYERS, f"build_model: expected {LAYERS} linear layers, got {len(linear)}")
    shapes = {tuple(m.weight.shape) for m in linear}
    rank.expect(shapes == {(WIDTH, WIDTH)}, f"build_model: expected layers of {WIDTH} by {WIDTH}, got {shapes}")
    rank.expect(all(m.bias is not None for m in linear), "build_model: a linear layer has no bias")
    got = [type(m).__name__ for m in parts]
    wanted = ["Linear", "ReLU"] * (LAYERS - 1) + ["Linear"]
    rank.expect(got == wanted, f"build_model: expected {order(wanted)}, got {order(got)}")
    rank.guess("PREDICTED_PARAMETERS", sum(p.numel() for p in built.parameters()))

    model = nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 9)).double().to(rank.device)
    inputs, targets = rank.same(SAMPLES, 9, seed=1), rank.same(SAMPLES, 9, seed=2)
    known = {
        "gradients of earlier steps were never cleared: backward adds to .grad": "adds",
        "the optimizer stepped before backward: it used the gradient of the step before": "first",
        "the loss is a sum, not a mean: the gradient grows with the batch": "sum",
        "the gradient was cleared between backward and step: the weights did not move": "clears",
    }
    mine, right = copy.deepcopy(model), copy.deepcopy(model)
    wrongs = {name: copy.deepcopy(model) for name in known}
    expected = reference(right, inputs, targets)
    for name, mistake in known.items():
        reference(wrongs[name], inputs, targets, mistake)
    losses = rank.exercise.train(mine, inputs, targets, BATCH, LR)
    plain = isinstance(losses, list) and all(isinstance(loss, float) for loss in losses)
    rank.expect(plain, "train: expected a list of numbers; .item() makes one of a tensor")
    short = len(losses) == SAMPLES // BATCH
    rank.expect(not short, f"the last batch, which is smaller, was left out: {len(losses)} steps of {len(expected)}")
    rank.expect_model("weights after one pass: the weight", mine, right, wrongs)
    rank.expect_tensor("losses", torch.tensor(losses, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))

    seconds_of = rank.exercise.seconds_for(700, 200, 3.0)
    name = "seconds_for: time grows with samples, not with steps: what `done` took must be divided out"
    rank.expect_number("seconds_for(700, 200, 3.0)", seconds_of, 10.5, {name: 2100.0})

    data = rank.same(20 * BATCH, WIDTH, seed=3, dtype=torch.float32)
    start = time.perf_counter()
    rank.exercise.train(built.to(rank.device), data, data, BATCH, 1e-3)
    seconds = rank.exercise.seconds_for(MILLION, len(data), time.perf_counter() - start)
    rank.note(f"a million samples would take {duration(seconds)} on this one process")
