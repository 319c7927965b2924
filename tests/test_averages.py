"""Averages of the weights, and clipping by value: against torch in one process, under every engine; in checkpoints,
evaluation, export and a user's loop.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep
from lockstep.config import GPT, MLP, Checkpoint, Config, Data, Metrics, Parallel, Train
from lockstep.data import Samples, build_data
from lockstep.errors import UserError
from lockstep.inference.export import export_weights
from lockstep.layout.world import World
from lockstep.models import build_model
from lockstep.models.loss import cross_entropy_sum
from lockstep.strategies import Options, make_layout, parallelize, strategy_named
from lockstep.strategies.combining import check_optimizer
from lockstep.training.evaluate import evaluate
from lockstep.training.loop import train
from lockstep.verify.scenarios import Scenario
from tests.ranks import on_ranks

DECAY, LIMIT, STEPS = 0.7, 2e-3, 4
SCENARIO = Scenario("averages", GPT(d_model=16, layers=4, heads=4, context=8, vocabulary=19), (8,))
AT_2 = [
    *("naive", "bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp", "zero1_torch"),
    *("single,tp=2:sequence", "bucketed,cp=2", "single,pp=2:1f1b"),
]
AT_4 = ["zero3,tp=2:sequence", "zero1,pp=2:zb-h1", "fsdp+HYBRID_SHARD", "fsdp,tp=2:native"]


def one_process(clip_value: float | None) -> tuple[dict[str, Tensor], float]:
    """torch's own average over a plain loop, and the loss of its weights."""
    model = SCENARIO.build(seed=0).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(STEPS):
        batch = SCENARIO.global_batch(step)
        optimizer.zero_grad()
        loss = cross_entropy_sum(model(batch.inputs), batch.targets) / int(batch.target_count())
        loss.backward()
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
        average.update_parameters(model)
    test = SCENARIO.test_batch()
    averaged = average.module
    with torch.no_grad():
        loss = cross_entropy_sum(averaged(test.inputs), test.targets) / int(test.target_count())
    return {n: p.detach() for n, p in averaged.named_parameters()}, float(loss)


def averaged_by(world: World, names: list[str], clip_value: float | None) -> dict[str, tuple[float, float, float]]:
    """Of each strategy: how far its averages, and the loss that it evaluates, are from one process's; by how much an
    evaluation moves the weights.
    """
    expected, loss = one_process(clip_value)
    test = SCENARIO.test_batch()
    found = {}
    for name in names:
        parallel = strategy_named(name, Parallel(bucket_mb=0.01))
        options = Options(
            cross_entropy_sum,
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            parallel,
            precision="fp64",
            clip_value=clip_value,
            ema=DECAY,
        )
        strategy = parallelize(SCENARIO.unbuilt(world.rank), make_layout(world, parallel), options)
        for step in range(STEPS):
            strategy.step(SCENARIO.global_batch(step).share(strategy.batch_share()))
            if step == 1:
                evaluate(strategy, Samples(test.inputs, test.targets), batch_size=4)
        before = {n: held.tensor.clone() for n, held in strategy.held().items()}
        got = evaluate(strategy, Samples(test.inputs, test.targets), batch_size=4)
        assert got is not None
        moved = max(
            (float((h.tensor - before[n]).abs().max()) for n, h in strategy.held().items() if h.tensor.numel()),
            default=0.0,
        )
        with strategy.evaluation_weights():
            whole = strategy.full_state_dict()
        found[name] = (max(float((whole[n] - expected[n]).abs().max()) for n in expected), abs(got[0] - loss), moved)
    return found


@pytest.mark.parametrize(
    ("ranks", "names", "clip_value"),
    [
        pytest.param(2, AT_2, None, marks=pytest.mark.slow),
        pytest.param(4, AT_4, LIMIT, marks=pytest.mark.slow),
        (2, AT_2[:7], LIMIT),
    ],
)
def test_averages_are_those_of_one_process(ranks: int, names: list[str], clip_value: float | None) -> None:
    for found in on_ranks(averaged_by, ranks, names, clip_value, timeout=240):
        for name, (weights, loss, moved) in found.items():
            assert max(weights, loss) < 1e-10, (name, weights, loss)
            assert moved == 0.0, name


def test_the_limit_of_elements_matters() -> None:
    clipped, plain = one_process(LIMIT)[0], one_process(None)[0]
    assert any(float((clipped[n] - plain[n]).abs().max()) > 1e-4 for n in plain)


# ---- runs ----------------------------------------------------------------------------------------------------------


def config(data: str, **changes: object) -> Config:
    return Config(
        replace(SCENARIO.model, layers=2),  # type: ignore[arg-type]
        Data("synthetic", samples=40),
        Train(**{"steps": 6, "batch_size": 8, "optimizer": "adamw", "lr": 0.01, "log_every": 1, **changes}),  # type: ignore[arg-type]
        Parallel(data),
        checkpoint=Checkpoint(every=3, keep_last=0),
        metrics=Metrics(tensorboard=False),
    )


def run_and_resume(world: World, folder: Path, data: str, changes: dict[str, object]) -> list[float]:
    """(the last evaluation, that after a resume from the third step)."""
    through = train(world, config(data, **changes), folder / "through", quiet=True)
    again = train(
        world,
        config(data, **changes),
        folder / "again",
        quiet=True,
        resume=folder / "through" / "checkpoints" / "step-00000003",
    )
    return [through.test_loss, again.test_loss]


@pytest.mark.parametrize(
    "changes", [{"ema": 0.6}, {"optimizer": "schedule_free", "schedule": "constant"}], ids=["ema", "schedule_free"]
)
def test_a_run_goes_on_and_exports_what_it_evaluated(tmp_path: Path, changes: dict[str, object]) -> None:
    for data in ("zero1", "zero3"):
        home = tmp_path / data
        [(through, again), _] = on_ranks(run_and_resume, 2, home, data, changes, timeout=120)
        assert through == again
        exported = home / "weights.safetensors"
        export_weights(home / "through", exported)
        trained = load_file(exported)
        assert evaluated(trained) == pytest.approx(through, rel=1e-6)


def evaluated(tensors: dict[str, Tensor]) -> float:
    """The loss of exported weights on the run's test set."""
    asked = config("single")
    dataset = build_data(asked)
    model = build_model(asked.model, dataset.spec)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])  # tied to the embedding
    batch = dataset.test.batch(torch.arange(len(dataset.test)))
    with torch.no_grad():
        return float(cross_entropy_sum(model(batch.inputs), batch.targets)) / int(batch.target_count())


def test_an_average_begins_after_a_checkpoint_without_one(tmp_path: Path) -> None:
    """Not with the random weights that a model has before a checkpoint is loaded."""

    [(with_it, without), _] = on_ranks(begin_averaging, 2, tmp_path, timeout=120)
    assert with_it == pytest.approx(without, rel=1e-12)


def begin_averaging(world: World, folder: Path) -> list[float]:
    """One more step after a checkpoint: an average that has just begun is that step's weights."""
    train(world, config("zero2", steps=4, schedule="constant"), folder / "first", quiet=True)
    saved = folder / "first" / "checkpoints" / "step-00000003"
    runs = [
        train(world, config("zero2", steps=4, schedule="constant", **more), folder / name, quiet=True, resume=saved)
        for name, more in (("with", {"ema": 0.99}), ("without", {}))
    ]
    return [run.test_loss for run in runs]


def other_optimizers(world: World, folder: Path) -> list[str]:
    """What is said when a run goes on with an optimizer whose state has only some of the same names."""
    said = []
    for name, first, second in (
        ("to_free", {}, {"optimizer": "schedule_free", "schedule": "constant"}),
        ("from_muon", {"optimizer": "muon"}, {}),
    ):
        train(world, config("zero1", **first), folder / name, quiet=True)
        saved = folder / name / "checkpoints" / "step-00000003"
        try:
            train(world, config("zero1", **second), folder / f"{name}_2", quiet=True, resume=saved)
        except UserError as error:
            said.append(str(error))
    return said


def test_a_run_does_not_go_on_with_another_optimizers_state(tmp_path: Path) -> None:
    for said in on_ranks(other_optimizers, 2, tmp_path, timeout=120):
        assert len(said) == 2
        assert all("use the same train.optimizer" in line for line in said)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lockstep.Muon])
def test_an_average_takes_each_step_once_and_is_saved_with_its_state(make: type[torch.optim.Optimizer]) -> None:
    """Also of an optimizer whose base class is hooked already; and not of what is frozen."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    optimizer = make(layer.parameters(), lr=0.1)  # type: ignore[call-arg]
    average = lockstep.WeightAverage(optimizer, 0.5)
    expected = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        layer(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        expected.update_parameters(layer)
    with average.applied():
        assert torch.allclose(layer.weight, expected.module.weight, atol=1e-7)
    assert set(average.tensors) == {layer.weight}
    other = nn.Linear(4, 4)
    other.load_state_dict(layer.state_dict())
    again = make(other.parameters(), lr=0.1)  # type: ignore[call-arg]
    again.load_state_dict(optimizer.state_dict())
    loaded = lockstep.WeightAverage(again, 0.9)
    loaded.load_state_dict(average.state_dict())
    assert loaded.decay == 0.5
    assert torch.equal(loaded.tensors[other.weight], average.tensors[layer.weight])


def test_an_average_of_narrow_weights_moves() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    average = lockstep.WeightAverage(optimizer, 0.999)
    for step in range(500):
        parameter.grad = torch.full_like(parameter, -1.0) if step == 1 else None
        optimizer.step()
    with average.applied():
        assert 1.15 < float(parameter.detach()[0]) < 1.25
    assert float(parameter.detach()[0]) == 1.5


def interrupted(world: World) -> list[str]:
    """All ranks fail while the average is in place: each raises its own error, and none takes a step afterwards."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = lockstep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    wrapped = lockstep.ShardedDataParallel(model, optimizer, stage=1)
    average = lockstep.WeightAverage(optimizer, 0.5)
    said = []
    for _ in range(2):
        wrapped(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    try:
        with average.applied():
            raise ValueError(f"rank {world.rank}")
    except ValueError as error:
        said.append(str(error))
    try:
        optimizer.step()
    except RuntimeError as error:
        said.append(str(error)[:31])
    return said


def test_an_exception_while_the_average_is_in_place() -> None:
    assert on_ranks(interrupted, 2, timeout=60) == [[f"rank {r}", "an exception has ended an evalu"] for r in range(2)]


class Unused(nn.Module):
    """One layer is never used, one is frozen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.used(x))
        return y


def saved_and_loaded(world: World, folder: Path) -> list[float]:
    """What a model gives with its average, before it is saved and after another has loaded it."""
    found = []
    inputs = torch.arange(8.0).view(2, 4)
    for seed in (0, 1):
        model = Unused(seed)
        wrapped = lockstep.DataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        average = lockstep.WeightAverage(optimizer, 0.5)
        if seed == 0:
            for _ in range(3):
                optimizer.zero_grad()
                wrapped(inputs).square().mean().backward()
                optimizer.step()
            lockstep.save(folder, wrapped, optimizer, step=3)
        else:
            lockstep.load(folder, wrapped, optimizer)
        with torch.no_grad(), average.applied():
            found.append(float(wrapped(inputs).sum() + model.unused(inputs).sum()))
    return found


def test_what_is_unused_or_frozen_is_loaded_too(tmp_path: Path) -> None:
    for before, after in on_ranks(saved_and_loaded, 2, tmp_path, timeout=60):
        assert before == after


def in_a_plain_loop(world: World, kind: str) -> float:
    """How far the averages of a user's loop are from torch's."""
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()  # noqa: E731
    plain = make()
    ours = make()
    ours.load_state_dict(plain.state_dict())
    alone = torch.optim.AdamW(plain.parameters(), lr=0.01)
    expected = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    if kind == "zero2":
        optimizer = lockstep.ShardedOptimizer(ours.parameters(), torch.optim.AdamW, lr=0.01)
        wrapped: nn.Module = lockstep.ShardedDataParallel(ours, optimizer, stage=2)
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(ours)
        wrapped.set_force_sum_reduction_for_comms(True)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)  # type: ignore[assignment]
    else:
        wrapped = lockstep.DataParallel(ours)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)  # type: ignore[assignment]
    average = lockstep.WeightAverage(optimizer, DECAY)
    rows = torch.randn(4, 8, 6, dtype=torch.float64)
    probe = torch.randn(5, 6, dtype=torch.float64)
    worst = 0.0
    for batch in rows:
        for model, stepped, inputs in ((wrapped, optimizer, batch.chunk(2)[world.rank]), (plain, alone, batch)):
            stepped.zero_grad()
            model(inputs).square().mean().backward()
            stepped.step()
        expected.update_parameters(plain)
        with torch.no_grad():
            with average.applied(wrapped):
                worst = max(worst, float((wrapped(probe) - expected(probe)).abs().max()))
            worst = max(worst, float((wrapped(probe) - plain(probe)).abs().max()))
    return worst


@pytest.mark.parametrize("kind", ["bucketed", "zero2", "fsdp2"])
def test_in_a_plain_loop(kind: str) -> None:
    assert max(on_ranks(in_a_plain_loop, 2, kind, timeout=120)) < 1e-12


def test_what_does_not_go_together_says_so() -> None:
    from lockstep.config.check import check_ranges

    for train_, said in (
        (Train(clip_norm=1.0, clip_value=0.1), "leave one out"),
        (Train(optimizer="schedule_free"), "--train.schedule constant"),
        (Train(optimizer="schedule_free", schedule="constant", ema=0.9), "leave train.ema out"),
        (Train(optimizer="schedule_free", schedule="constant", betas=(0.0, 0.9)), "more than 0"),
        (Train(ema=1.0), "train.ema is 1.0"),
    ):
        with pytest.raises(UserError, match=said):
            check_ranges(Config(MLP(), Data("synthetic"), train_))
    for train_, data in (
        (Train(ema=0.9), "local_sgd"),
        (Train(ema=0.9), "deepspeed"),
        (Train(clip_value=1.0), "deepspeed"),
    ):
        with pytest.raises(UserError, match="does not go with"):
            check_optimizer(train_, Parallel(data))
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    lockstep.WeightAverage(optimizer, 0.5)
    with pytest.raises(UserError, match="already"):
        lockstep.WeightAverage(optimizer, 0.5)
    with pytest.raises(UserError, match="already"):
        lockstep.WeightAverage(lockstep.ScheduleFreeAdamW([parameter]), 0.5)
    with pytest.raises(UserError, match="decay is 1"):
        lockstep.WeightAverage(torch.optim.SGD([parameter], lr=0.1), 1.0)
