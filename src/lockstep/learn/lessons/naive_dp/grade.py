"""Ranks against one process, over several steps and batches that the ranks do not divide."""

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.learn.rank import Rank

BATCH, STEPS, LR = 7, 3, 0.1
PARAMETERS, WIDTH, RANKS = 1000, 8, 3


def facts() -> list[str]:
    """Numbers of the text."""
    return [f"model of {PARAMETERS:,} parameters of {WIDTH} bytes on {RANKS} ranks"]


class Counting(nn.Module):
    """A model that knows how many samples it has computed."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, width)).double()
        self.samples = 0

    def forward(self, x: Tensor) -> Tensor:
        self.samples += len(x)
        return self.layers(x)


def one_step(model: nn.Module, x: Tensor, y: Tensor, ranks: int = 1, mistake: str = "") -> Tensor:
    """One process; or the ranks' result with a mistake."""
    model.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    if not mistake:
        loss.backward()
    else:
        for xs, ys in zip(x.tensor_split(ranks), y.tensor_split(ranks), strict=True):
            part = ((model(xs) - ys) ** 2).mean()
            (part if mistake == "sum" else part / ranks).backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return loss.detach()


def grade(rank: Rank) -> None:
    torch.manual_seed(3 + rank.rank)  # each rank would train a model of its own
    mine = Counting().to(rank.device)
    own = copy.deepcopy(mine)
    torch.manual_seed(3)
    whole = Counting().to(rank.device)
    trainer: Any = rank.exercise.Trainer(mine, LR)
    alone = {"rank 0 never broadcast its weights: this rank still has its own": own} if rank.rank else {}
    rank.expect_model("at the start: the weight", mine, whole, alone)

    for step in range(STEPS):
        x, y = rank.same(BATCH, 5, seed=10 + step), rank.same(BATCH, 5, seed=20 + step)
        wrongs = {
            "you summed, the mean is missing": copy.deepcopy(whole),
            "each rank counts the same, whatever it has seen: weight by samples": copy.deepcopy(whole),
        }
        for wrong, mistake in zip(wrongs.values(), ("sum", "mean"), strict=True):
            one_step(wrong, x, y, rank.size, mistake)
        mine.samples = 0
        loss = one_step(whole, x, y)
        with rank.recorder.during() as calls:
            start = time.perf_counter()
            reported = trainer.step(x, y)
            seconds = time.perf_counter() - start
        rank.expect(isinstance(reported, dict), f"step: expected a dictionary, got {type(reported).__name__}")
        unwaited = next((call for call in calls if not call.ended), None)
        said = f"an all-reduce of {unwaited.elements if unwaited else 0} was never waited for: it may come late"
        rank.expect(unwaited is None, said)
        share = len(x.tensor_split(rank.size)[rank.rank])
        every = mine.samples == BATCH
        rank.expect(not every, "every rank computed the whole batch: nothing is divided, so nothing is faster")
        rank.expect(mine.samples == share, f"step {step}: expected {share} samples on this rank, got {mine.samples}")
        rank.expect_model(f"after step {step}: the weight", mine, whole, wrongs)
        rank.expect_tensor(f"step {step}: the loss", torch.tensor(reported["loss"], dtype=torch.float64), loss.cpu())
        each = "one all-reduce for each gradient, and one for the loss; fewer messages are lesson 8"
        rank.expect_calls(calls, {"all_reduce": 5}, each)  # four parameters and the loss
        waited = sum(call.waited for call in calls)
        fair = 0.5 * waited <= reported["comm_seconds"] <= seconds
        found = f"comm_seconds: {reported['comm_seconds']:.4f} s"
        rank.expect(fair, f"{found}; its all-reduces took {waited:.4f} s, the whole step {seconds:.4f} s")
        rank.expect(0 < reported["comm_share"] < 1, f"comm_share: expected a share of 1, got {reported['comm_share']}")

    if rank.size == RANKS:
        line = nn.Linear(PARAMETERS, 1, bias=False).double().to(rank.device)
        trainer = rank.exercise.Trainer(line, LR)
        with rank.recorder.during() as calls:
            reported = trainer.step(rank.same(BATCH, PARAMETERS), rank.same(BATCH, 1))
        rank.guess("PREDICTED_BYTES", sum(call.sent for call in calls if call.elements > 1))
        rank.note(f"communication took {reported['comm_share']:.0%} of that step")
