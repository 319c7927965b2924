"""The proof can fail: faults planted in a strategy must each be found and named."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.comm.collectives import broadcast
from lockstep.config import GPT, ResNet
from lockstep.data import Batch
from lockstep.errors import UserError
from lockstep.layout.region import local
from lockstep.layout.world import World
from lockstep.models.initial import seeded
from lockstep.parallel.data.law import bucket_sizes, thin_elements
from lockstep.strategies import Engine, available_strategies
from lockstep.strategies.data_parallel import HandWritten
from lockstep.strategies.fully_sharded import FullySharded
from lockstep.strategies.sharded import ShardedState
from lockstep.strategies.step import Cut
from lockstep.strategies.worker import Worker
from lockstep.verify import Request, Verdict, verify
from lockstep.verify.run import Proofs
from lockstep.verify.scenarios import SMALL_CNN, Scenario, scenarios_for
from tests.ranks import LONG, on_ranks


class NotAveraged(HandWritten):
    """The last parameter keeps each rank's own gradient."""

    def synchronize(self, last: bool) -> AbstractContextManager[None]:
        return self.module.no_sync()

    def finish_gradients(self) -> None:
        parameter = self.trainable()[-1]
        assert parameter.grad is not None
        own = parameter.grad.clone()
        self.module._forward_ran = True  # as after a backward outside no_sync
        super().finish_gradients()
        parameter.grad = own


class NotBroadcast(HandWritten):
    """Rank 1 starts with a bias of its own."""

    def wrap(self, stage: nn.Module) -> None:
        super().wrap(stage)
        if self.layout.world.rank == 1:
            with torch.no_grad():
                next(p for n, p in self.model.named_parameters() if n.endswith("bias")).add_(0.01)


class SumForMean(HandWritten):
    """Gradients are added over the ranks and not divided."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        for parameter in self.trainable():
            if parameter.grad is not None:
                parameter.grad.mul_(self.layout.world.size)


class DroppedSample(HandWritten):
    """The last rank forgets the last sample of its share."""

    def custom_worker(self, cut: Cut) -> Worker:
        return ForgetfulWorker(self, cut)


class ForgetfulWorker(Worker):
    def step(self, batch: Batch):  # type: ignore[no-untyped-def]
        last = self.layout.world.rank == self.layout.world.size - 1
        return super().step(Batch(batch.inputs[:-1], batch.targets[:-1]) if last and len(batch) > 1 else batch)


class MeanOfMeans(HandWritten):
    """Weights by ranks and not by counts: right on even batches only."""

    def custom_worker(self, cut: Cut) -> Worker:
        return WorkerByRanks(self, cut)


class WorkerByRanks(Worker):
    def _weighted(self, loss_sum: Tensor, micro_batch: Batch, count: Tensor) -> Tensor:
        mine = micro_batch.target_count() * self.layout.batch.size  # as if every rank had as many as this one
        return super()._weighted(loss_sum, micro_batch, torch.as_tensor(float(mine)))


class TwoMessages(HandWritten):
    """Correct weights, one collective too many."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        broadcast(torch.zeros(1), purpose="gradients")


class NotGathered(ShardedState):
    """ZeRO: the parameters of one bucket are not sent after the step."""

    def wrap(self, stage: nn.Module) -> None:
        super().wrap(stage)
        self.optimizer.buckets[0].issue_gather = lambda: None  # type: ignore[method-assign]


class WrongPart(ShardedState):
    """ZeRO: each rank keeps the mean of its neighbour's part."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        for held in self.trained().values():
            assert held.parameter.grad is not None
            held.parameter.grad.copy_(held.parameter.grad.roll(1))


class NotReduced(FullySharded):
    """ZeRO-3: rank 1 steps with its own gradient's part of one unit, not with the mean's."""

    def finish_gradients(self) -> None:
        super().finish_gradients()
        unit = self.module.trained_units()[0]
        if self.layout.world.rank == 1 and unit.gradient is not None:
            unit.gradient.mul_(1.5)


class CountedTwice(FullySharded):
    """The norm counts what several ranks hold as often as it is held."""

    def custom_worker(self, cut: Cut) -> Worker:
        worker = Worker(self, cut)
        norm = worker.gradients.norm
        worker.gradients.norm = lambda: norm() * self.layout.world.size**0.5  # type: ignore[method-assign]
        return worker


class ClippedAlone(ShardedState):
    """Each rank clips its part by the norm of that part."""

    def custom_worker(self, cut: Cut) -> Worker:
        worker = Worker(self, cut)
        clip = worker.gradients.clip

        def by_own_norm(_: Tensor, limit: float) -> None:
            clip(nn.utils.get_total_norm([local(g) for g in worker.gradients.tensors()]), limit)

        worker.gradients.clip = by_own_norm  # type: ignore[method-assign]
        return worker


class LateForgotten(HandWritten):
    """Gradients that come when their bucket has been issued are dropped."""

    def wrap(self, stage: nn.Module) -> None:
        super().wrap(stage)
        for bucket in self.module.buckets:
            late = bucket.late_parameters
            bucket.late_parameters = lambda late=late: [setattr(p, "grad", None) for p in late()] and []  # type: ignore


class OwnBuffers(HandWritten):
    """Every rank computes with buffers of its own."""

    def wrap(self, stage: nn.Module) -> None:
        super().wrap(stage)
        self.module._buffers_may_differ = False
        for _, buffer in stage.named_buffers():
            buffer.add_(self.layout.world.rank)

    def synchronize(self, last: bool) -> AbstractContextManager[None]:
        self.module._buffers_may_differ = False
        return nullcontext()


FAULTS: dict[str, tuple[str, type[Engine]]] = {  # name -> (in whose place, the faulty engine)
    "not averaged": ("flat", NotAveraged),
    "not broadcast": ("flat", NotBroadcast),
    "sum for mean": ("flat", SumForMean),
    "dropped sample": ("flat", DroppedSample),
    "mean of means": ("flat", MeanOfMeans),
    "two messages": ("flat", TwoMessages),
    "not gathered": ("zero1", NotGathered),
    "wrong part": ("zero2", WrongPart),
    "not reduced": ("zero3", NotReduced),
    "counted twice": ("zero3", CountedTwice),
    "clipped alone": ("zero1", ClippedAlone),
    "late forgotten": ("bucketed", LateForgotten),
    "own buffers": ("bucketed", OwnBuffers),
    "none": ("flat", HandWritten),
    "none, late": ("bucketed", HandWritten),
    "none, buffers": ("bucketed", HandWritten),
}


class TwiceInBackward(nn.Module):
    """A layer in two re-entrant segments: its gradient comes in two parts, the second one late."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda t: self.shared(t).tanh(), x, use_reentrant=True)
        logits: Tensor = self.head(x)
        return logits


class WithBuffer(nn.Module):
    """Projects by a random matrix that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 10)
        self.register_buffer("projection", torch.randn(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1) @ self.projection)
        return logits


@dataclass(frozen=True)
class OwnModel(Scenario):
    """A scenario with a model of ours instead of the config's."""

    make: type[nn.Module] = nn.Module

    def unbuilt(self, seed: int) -> nn.Module:
        with seeded(seed):
            return self.make()


def scenarios(fault: str) -> list[Scenario]:
    if "late" in fault:
        return [OwnModel("late", SMALL_CNN, (12,), make=TwiceInBackward)]
    if "buffers" in fault:
        return [OwnModel("buffers", SMALL_CNN, (12,), make=WithBuffer)]
    return scenarios_for(None)


def verify_faults(world: World) -> dict[str, Verdict]:
    found = {}
    for fault, (place, engine) in FAULTS.items():
        request = Request([place], steps=3)
        proofs = Proofs(world, request, scenarios(fault), {place: engine})
        found[fault] = proofs.of(place)
    return found


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    found: dict[str, Verdict] = on_ranks(verify_faults, 2)[0]
    return found


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("not averaged", "even: step 1, gradient of head.bias"),
        ("not broadcast", "even: before the first step, weight of convolutions.0.bias differs by"),
        ("sum for mean", "even: step 1, the norm or the mean (every gradient is 2 times as large) differs by"),
        ("dropped sample", "even: step 1, the number of targets (15) differs by 1.0e+00"),
        ("mean of means", "uneven: step 1"),
        ("two messages", "traffic: 2 collectives"),
        ("not gathered", "even: step 1, weight of"),
        ("wrong part", "even: step 1, gradient of"),
        ("not reduced", "(1.5 times as large)"),
        ("counted twice", "even: step 1, the norm of the gradients (1.17066 for 0.827781) differs by"),
        ("clipped alone", "accumulated: step 1, the norm or the mean (every gradient is"),
        ("late forgotten", "late: step 1, gradient of shared"),
        ("own buffers", "buffers: before the first step, weight of projection differs by"),
    ],
)
def test_a_planted_fault_is_named(verdicts: dict[str, Verdict], fault: str, where: str) -> None:
    assert not verdicts[fault].passed
    assert any(where in failure for failure in verdicts[fault].failures), verdicts[fault].failures


def test_faults_are_traced_to_the_rank_and_the_parameter(verdicts: dict[str, Verdict]) -> None:
    assert "on rank 0" in verdicts["not averaged"].failures[0]
    assert "on rank 1" in verdicts["not broadcast"].failures[0]
    assert "on rank 1" in verdicts["not reduced"].failures[0]
    assert "on rank 1" in verdicts["own buffers"].failures[0]


@pytest.mark.parametrize("fault", ["mean of means", "clipped alone"])
def test_what_is_right_on_even_batches_passes_there(verdicts: dict[str, Verdict], fault: str) -> None:
    assert verdicts[fault].comparisons["even"].first is None


@pytest.mark.parametrize("sound", ["none", "none, late", "none, buffers"])
def test_the_sound_one_beside_them_passes(verdicts: dict[str, Verdict], sound: str) -> None:
    failures = [f for f in verdicts[sound].failures if sound == "none" or not f.startswith("traffic")]
    assert not failures  # no closed form counts a second round, or buffers that are broadcast before each forward


def verify_all(world: World) -> list[Verdict]:
    return verify(world, Request([n for n in available_strategies() if n != "single"], steps=2, only_values=True))


def test_every_strategy_passes_alone() -> None:
    """2, 4 and 8 ranks are what `lockstep verify` itself runs by default; the slow tier has 3."""
    for verdict in on_ranks(verify_all, 1, timeout=LONG)[0]:
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
    assert thin_elements((64, 32), 2) == (192, True)
    assert thin_elements((3, 2), 2) == (6, False)
    assert thin_elements((8, 4, 3, 3), 1) == (44, True)
    assert thin_elements((10,), 1) == (10, False)
