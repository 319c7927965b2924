"""The proof can fail: faults planted in a strategy must each be found and named."""

import pytest
import torch
from torch import nn

from lockstep.comm.collectives import broadcast
from lockstep.config import GPT, ResNet
from lockstep.data import Share
from lockstep.errors import UserError
from lockstep.strategies import Strategy, available_strategies
from lockstep.strategies.base import MakeOptimizer
from lockstep.strategies.data_parallel import Flat
from lockstep.strategies.theory import bucket_sizes, powersgd_elements
from lockstep.verify import Request, Verdict, verify
from lockstep.verify.scenarios import scenarios_for
from lockstep.world import World
from tests.ranks import on_ranks


class NotAveraged(Flat):
    """The last parameter keeps each rank's own gradient."""

    def finish_gradients(self) -> None:
        parameter = self.trainable()[-1]
        own = parameter.grad
        super().finish_gradients()
        parameter.grad = own


class NotBroadcast(Flat):
    """Rank 1 starts with a bias of its own."""

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        super().prepare(model, make_optimizer)
        if self.world.rank == 1:
            with torch.no_grad():
                next(p for n, p in self.model.named_parameters() if n.endswith("bias")).add_(0.01)


class SumForMean(Flat):
    """Gradients are added over the ranks and not divided."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        for parameter in self.trainable():
            if parameter.grad is not None:
                parameter.grad.mul_(self.world.size)


class DroppedSample(Flat):
    """The last rank forgets the last sample of its share."""

    def batch_share(self) -> Share:
        return ShortShare(self.world.rank, self.world.size)


class ShortShare(Share):
    def of(self, length: int) -> slice:
        rows = super().of(length)
        return slice(rows.start, rows.stop - 1) if rows.stop - rows.start > 1 and self.index > 0 else rows


class MeanOfMeans(Flat):
    """Weights by ranks and not by counts: right on even batches only."""

    def _sum_over_data_ranks(self, tensor: torch.Tensor, purpose: str):  # type: ignore[no-untyped-def]
        if purpose == "count":
            tensor.mul_(self.world.size)  # as if every rank had as many as this one
            return super()._sum_over_data_ranks(torch.zeros_like(tensor), purpose)
        return super()._sum_over_data_ranks(tensor, purpose)


class TwoMessages(Flat):
    """Correct weights, one collective too many."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        broadcast(torch.zeros(1), purpose="gradients")


FAULTS: dict[str, tuple[str, type[Strategy]]] = {  # name -> (in whose place, the faulty strategy)
    "not averaged": ("flat", NotAveraged),
    "not broadcast": ("flat", NotBroadcast),
    "sum for mean": ("flat", SumForMean),
    "dropped sample": ("flat", DroppedSample),
    "mean of means": ("flat", MeanOfMeans),
    "two messages": ("flat", TwoMessages),
    "none": ("flat", Flat),
}


def verify_faults(world: World) -> dict[str, Verdict]:
    return {
        fault: verify(world, Request([place], steps=3), table={place: strategy})[0]
        for fault, (place, strategy) in FAULTS.items()
    }


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    found: dict[str, Verdict] = on_ranks(verify_faults, 2)[0]
    return found


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("not averaged", "even: step 1, gradient of head.bias"),
        ("not broadcast", "even: before the first step, weight of convolutions.0.bias differs by"),
        ("sum for mean", "gradient of convolutions.0.weight (2 times as large) differs by"),
        ("dropped sample", "even: step 1, the number of targets (15) differs by 1.0e+00"),
        ("mean of means", "uneven: step 1"),
        ("two messages", "traffic: 2 collectives"),
    ],
)
def test_a_planted_fault_is_named(verdicts: dict[str, Verdict], fault: str, where: str) -> None:
    assert not verdicts[fault].passed
    assert any(where in failure for failure in verdicts[fault].failures), verdicts[fault].failures


def test_faults_are_traced_to_the_rank_and_the_parameter(verdicts: dict[str, Verdict]) -> None:
    assert "on rank 0" in verdicts["not averaged"].failures[0]
    assert "on rank 1" in verdicts["not broadcast"].failures[0]


def test_a_mean_of_means_is_right_on_even_batches(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["mean of means"].comparisons["even"].first is None


def test_the_sound_one_beside_them_passes(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["none"].passed, verdicts["none"].failures


def verify_all(world: World) -> list[Verdict]:
    return verify(world, Request([n for n in available_strategies() if n != "single"], steps=3))


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_strategy_passes(ranks: int) -> None:
    """2 and 4 ranks are what `lockstep verify` itself runs by default; here are the odd ones."""
    for verdict in on_ranks(verify_all, ranks, timeout=120)[0]:
        assert verdict.passed, f"{verdict.strategy}: {verdict.failures}"


def verify_models(world: World) -> list[Verdict]:
    llama = GPT(d_model=16, layers=1, heads=4, kv_heads=2, context=8, norm="rmsnorm", position="rope")
    found = []
    for model in (llama, ResNet(width=4, norm="group")):
        found += verify(world, Request(["bucketed", "ddp"], steps=2, model=model))
    return found + verify(world, Request(["bucketed", "overlap"], steps=4, precision="fp32"))


def test_other_models_and_float32_pass() -> None:
    for verdict in on_ranks(verify_models, 2)[0]:
        assert verdict.passed, f"{verdict.strategy}: {verdict.failures}"


def test_batch_norm_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"use --model.norm group"):
        scenarios_for(ResNet())


def test_senseless_requests_are_refused() -> None:
    with pytest.raises(UserError, match="--steps is 0"):
        Request(["flat"], steps=0)
    with pytest.raises(UserError, match="--precision is bf16"):
        Request(["flat"], precision="bf16")


def test_closed_forms_by_hand() -> None:
    # 4-byte elements; first bucket closes at a third of 1 MiB, later ones at 1 MiB = 262144 elements.
    assert bucket_sizes([200_000, 100_000, 90_000], 4, 1.0, 1 / 3) == [[90_000], [100_000, 200_000]]
    assert powersgd_elements((64, 32), 2) == (192, True)
    assert powersgd_elements((3, 2), 2) == (6, False)
    assert powersgd_elements((8, 4, 3, 3), 1) == (44, True)
    assert powersgd_elements((10,), 1) == (10, False)
