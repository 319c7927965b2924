"""The training loop: the same run with one process and with many, its metrics, and what it does with NaN."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config import CNN, GPT, Config, Data, Parallel, ResNet, Train, load_config
from lockstep.data import Batch, build_data
from lockstep.errors import UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.models.loss import loss_for
from lockstep.strategies import (
    STRATEGIES,
    VARIANTS,
    Options,
    ParallelModel,
    available_strategies,
    make_layout,
    parallelize,
    strategy_named,
)
from lockstep.strategies.loss_scale import LossScale
from lockstep.strategies.nonfinite import locate_nonfinite
from lockstep.training.loop import train
from lockstep.training.metrics import MetricsWriter
from lockstep.training.optimizer import learning_rate, optimizer_factory
from lockstep.training.prepare import options_for, prepare_strategy
from lockstep.training.result import TrainResult
from tests.ranks import LONG, on_ranks

SMALL = CNN(channels=(8,), hidden=16)


def short(**changes: Any) -> Config:
    settings: dict[str, Any] = {"epochs": 1, "batch_size": 100, "lr": 0.2, "log_every": 1, "steps": 6, **changes}
    return Config(model=SMALL, train=Train(**settings))


@pytest.mark.slow
def test_the_digits_reach_98_percent_with_one_process_and_with_two(tmp_path: Path) -> None:
    config = load_config("configs/digits_cnn.yaml")
    config.train.precision = "fp64"  # rounding in fp32 grows to 0.01 of a loss on the way
    results: dict[int, TrainResult] = {}
    for ranks in (1, 2):
        launch = Launch(nproc=ranks, device="cpu")
        results[ranks] = run_on_ranks(train, config, tmp_path / str(ranks), True, launch=launch)[0]
        assert results[ranks].test_accuracy >= 0.98
    assert results[1].losses == pytest.approx(results[2].losses, abs=1e-9)
    assert load_config(tmp_path / "2" / "config.yaml") == config


def train_several(world: World) -> dict[str, Any]:
    """Many short runs, one start of the ranks."""
    base = short(precision="fp64")
    runs: dict[str, Any] = {}
    for name in available_strategies():
        precision = STRATEGIES[name.partition("+")[0]].verified_in or "fp64"
        config = replace(base, parallel=strategy_named(name), train=replace(base.train, precision=precision))
        runs[name] = train(world, config, quiet=True).losses
    for accumulation in (2, 5):
        config = replace(base, train=replace(base.train, accumulation=accumulation))
        runs[f"accumulation {accumulation}"] = train(world, config, quiet=True).losses
    for precision in ("fp32", "bf16", "fp16"):
        config = replace(base, train=replace(base.train, precision=precision))
        runs[precision] = train(world, config, quiet=True).losses
    resnet = ResNet(width=4)  # BatchNorm, and shares of one sample
    runs["resnet"] = train(
        world, replace(short(batch_size=3, steps=3, accumulation=2), model=resnet), quiet=True
    ).losses
    tiny = replace(base, train=replace(base.train, batch_size=1, steps=3))
    runs["batch 1"] = train(world, tiny, quiet=True).losses
    stateful = ("bucketed+powersgd", "ddp", "local_sgd+diloco", "zero1", "zero2", "zero3", "fsdp", "zero1_torch")
    runs["state"] = {name: resumes_alike(world, name) for name in stateful}
    runs["nan"] = nan_on_one_rank(world)
    nan_where_a_rank_steps_nothing(world)
    runs["overflow"] = fp16_overflow(world)
    return runs


def resumes_alike(world: World, name: str) -> float:
    """Stop after 3 steps, load into a fresh strategy, go on: how far from the run that never stopped."""
    config = replace(short(precision="fp64", optimizer="adamw", lr=1e-3), parallel=strategy_named(name))
    config.parallel.sync_every = 2
    dataset = build_data(config)
    share = dataset.train.batch(torch.arange(world.rank, 60, world.size))

    def fresh() -> ParallelModel:
        return prepare_strategy(world, config, dataset)

    straight, stopped, resumed = fresh(), fresh(), fresh()
    for _ in range(3):
        straight.step(share)
        stopped.step(share)
    resumed.state.load(stopped.state.state_dict())
    for _ in range(3):
        straight.step(share)
        resumed.step(share)
    mine, theirs = resumed.full_state_dict(), straight.full_state_dict()
    return max(float((mine[n] - theirs[n]).abs().max()) for n in theirs)


class Reads(TorchDispatchMode):
    """Counts how often the host asks for a tensor's value: on a GPU it would have to wait."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op is torch.ops.aten._local_scalar_dense.default
        return op(*args, **(kwargs or {}))


def nan_on_one_rank(world: World) -> dict[str, Any]:
    """A NaN in rank 1's inputs: nobody steps, the rank is named, and training goes on after it."""
    found: dict[str, Any] = {}
    usual = [(name, "sgd") for name in ("single", "bucketed", "ddp", "local_sgd", "bucketed+topk")]
    fused = ("single", "bucketed", "bucketed+topk", "local_sgd", "ddp", "zero1", "zero2", "zero3", "fsdp")
    for name, optimizer in [*usual, *((name, "fused adamw") for name in (*fused, "zero1_torch"))]:
        settings = short(precision="fp64", optimizer=optimizer.split()[-1], lr=0.01, clip_norm=1.0)
        config = replace(settings, parallel=strategy_named(name))
        dataset = build_data(config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lockstep.training.optimizer.should_fuse", lambda _, o=optimizer: o.startswith("fused"))
            strategy = prepare_strategy(world, config, dataset)
        good = dataset.train.batch(torch.arange(world.rank, 40, world.size))
        inputs = good.inputs.clone()
        if world.rank == 1:
            inputs[0, 0, 0, 0] = float("nan")
        before = strategy.full_state_dict()
        result = strategy.step(Batch(inputs, good.targets))
        left_to_device = optimizer == "fused adamw" and name not in ("local_sgd", "bucketed+topk")
        assert (result.stepped is None) == left_to_device
        where = locate_nonfinite(strategy, Batch(inputs, good.targets))
        kept = all(torch.equal(t, before[n]) for n, t in strategy.full_state_dict().items())
        after = strategy.step(good)
        moved = any(not torch.equal(t, before[n]) for n, t in strategy.full_state_dict().items())
        with Reads() as reads:
            strategy.step(good)
        if name == "single":  # with others, hosts read what they exchange
            assert bool(reads.count) != left_to_device
        found[f"{name} {optimizer}"] = (result.skipped, kept, where, after.skipped, moved and after.loss == after.loss)
    return found


def nan_where_a_rank_steps_nothing(world: World) -> None:
    """One number to train: the optimizer of some rank has none of it, and must still skip and step with the others."""
    for name in ("zero1", "zero2", "zero3", "zero1_torch"):
        optimizer = optimizer_factory(Train(optimizer="adamw", lr=0.01))
        options = Options(loss_for("regression"), optimizer, strategy_named(name))
        strategy = parallelize(nn.Linear(1, 1, bias=False), make_layout(world, options.parallel), options)
        good = Batch(torch.ones(2, 1), torch.ones(2, 1))
        bad = Batch(good.inputs * (float("nan") if world.rank == 1 else 1.0), good.targets)
        assert [strategy.step(batch).skipped for batch in (good, bad, good)] == [False, True, False], name


class Overflowing(nn.Module):
    """Its gradients fit fp16 only under a small loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = 300.0 * self.linear(x.flatten(1))
        return logits

    def forward_flops(self) -> int:
        return 1


def fp16_overflow(world: World) -> tuple[int, int, float]:
    """(steps skipped, steps taken, final loss scale) of a model whose first steps overflow."""
    config = short(precision="fp16", lr=1e-6)
    dataset = build_data(config)
    options = replace(options_for(config, dataset), make_optimizer=lambda p: torch.optim.SGD(p, 1e-6))
    strategy = parallelize(Overflowing(), make_layout(world, config.parallel), options)
    strategy.worker.loss_scale = LossScale(2.0**24)
    batch = dataset.train.batch(torch.arange(world.rank, 40, world.size))
    skipped = [strategy.step(batch).skipped for _ in range(24)]
    assert strategy.loss_scale is not None
    return sum(skipped), len(skipped) - sum(skipped), strategy.loss_scale.scale


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return on_ranks(train_several, 2, timeout=LONG)


EQUAL = ("naive", "flat", "overlap", "bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp", "zero1_torch")


@pytest.mark.parametrize("name", [*EQUAL, "accumulation 2", "accumulation 5"])
def test_every_strategy_has_the_losses_of_one_process(runs: list[dict[str, Any]], name: str) -> None:
    assert runs[0][name] == pytest.approx(runs[0]["single"], abs=1e-12)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.1), ("fp16", 0.02)])
def test_lower_precision_stays_close(runs: list[dict[str, Any]], precision: str, tolerance: float) -> None:
    assert runs[0][precision] == pytest.approx(runs[0]["single"], abs=tolerance)


def test_approximate_strategies_learn(runs: list[dict[str, Any]]) -> None:
    for name in VARIANTS:
        assert name not in runs[0] or mean(runs[0][name][4:]) < mean(runs[0][name][:2])  # each step has another batch


def test_all_ranks_report_one_loss(runs: list[dict[str, Any]]) -> None:
    assert runs[0]["bucketed"] == runs[1]["bucketed"]


def test_a_batch_smaller_than_the_world_trains(runs: list[dict[str, Any]]) -> None:
    assert len(runs[0]["batch 1"]) == 3
    assert len(runs[0]["resnet"]) == 3


def test_a_loaded_state_goes_on_as_if_never_stopped(runs: list[dict[str, Any]]) -> None:
    assert runs[0]["state"] == dict.fromkeys(runs[0]["state"], 0.0)


def test_a_nan_is_skipped_by_all_and_traced_to_its_rank(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        for name, (skipped, kept, where, skipped_after, finite_after) in rank["nan"].items():
            if name.startswith("single") and rank is runs[0]:
                continue  # rank 0 by itself has no NaN
            assert (skipped, kept, skipped_after, finite_after) == (True, True, False, True), name
            shown = "rank 1: its inputs" if name.startswith("fsdp") else "rank 1: its inputs and "
            assert where.startswith(shown), (name, where)


def test_fp16_finds_its_loss_scale(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        skipped, taken, scale = rank["overflow"]
        assert skipped > 0
        assert taken > 0
        assert scale < 2.0**24
    assert runs[0]["overflow"] == runs[1]["overflow"]


def test_who_is_asked_to_stop_while_it_evaluates_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SIGTERM does; what was trained is saved."""
    whole = ParallelModel.evaluate

    def asked(strategy: ParallelModel, batch: Batch) -> Tensor:
        strategy.request_stop()
        return whole(strategy, batch)

    monkeypatch.setattr(ParallelModel, "evaluate", asked)
    monkeypatch.setattr("lockstep.training.loop.EVALUATION_BATCH", 16)
    result = train(World(), short(steps=2), tmp_path, quiet=True)
    assert result.stopped
    assert result.test_loss != result.test_loss
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()


def test_ten_bad_steps_in_a_row_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.loop.check_ranges", lambda _: None)  # it refuses such a rate
    config = short(lr=float("inf"), steps=None, epochs=3, schedule="constant")
    with pytest.raises(UserError, match=r"10 steps in a row.*rank 0: weight .*lower train\.lr"):
        train(World(), config, tmp_path, quiet=True)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("skipped") == 10


def test_metrics_hold_what_was_promised(tmp_path: Path) -> None:
    model = GPT(d_model=16, layers=1, heads=2, context=16)
    data = Data(name="text", max_bytes=20_000)
    config = Config(model, data, Train(batch_size=8, steps=4, log_every=2, optimizer="adamw", lr=1e-3), Parallel())
    train(World(), config, tmp_path, quiet=True)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first = records[0]
    for key in ("loss", "accuracy", "lr", "grad_norm", "samples_per_s", "tokens_per_s", "mfu"):
        assert key in first
    for phase in ("data", "forward", "backward", "exposed", "optimizer"):
        assert first[f"{phase}_ms"] >= 0
    assert [r["kind"] for r in records] == ["train", "train", "test"]
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_a_run_repeats_itself_by_its_seed() -> None:
    one, same, other = (train(World(), short(seed=s), quiet=True).losses for s in (3, 3, 4))
    assert one == same
    assert one != other


def test_schedules() -> None:
    warm = Train(lr=1.0, warmup_steps=4, schedule="cosine", lr_decay=0.1)
    rates = [learning_rate(warm, s, 104) for s in range(105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[54] == pytest.approx(0.55)
    assert rates[104] == pytest.approx(0.1)
    steps = Train(lr=1.0, schedule="step", lr_decay=0.1, lr_milestones=(0.5, 0.75))
    assert [round(learning_rate(steps, s, 100), 4) for s in (0, 49, 50, 74, 75, 99)] == [1, 1, 0.1, 0.1, 0.01, 0.01]
    assert learning_rate(Train(lr=0.3, schedule="constant"), 7, 9) == 0.3


def test_looking_a_step_later_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the host issues a step before it looks at the one before."""
    config = short(evaluate_every=1, batch_size=500, log_every=2)
    at_once = train(World(), config, tmp_path / "at_once", quiet=True)
    monkeypatch.setattr("lockstep.training.loop.steps_ahead", lambda _: 1)
    later = train(World(), config, tmp_path / "later", quiet=True)
    assert (later.losses, later.steps) == (at_once.losses, at_once.steps)
    timeless = {"kind", "step", "epoch", "loss", "lr", "accuracy", "grad_norm"}
    records = [
        [{k: v for k, v in json.loads(line).items() if k in timeless} for line in lines]
        for lines in ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("at_once", "later"))
    ]
    assert records[0] == records[1]
    assert [r["kind"] for r in records[0]].count("test") > 1
    monkeypatch.setattr("lockstep.training.loop.check_ranges", lambda _: None)
    config = short(lr=float("inf"), steps=None, epochs=3, schedule="constant")
    with pytest.raises(UserError, match=r"10 steps in a row, up to step 11 "):
        train(World(), config, tmp_path, quiet=True)


def test_a_disk_that_fills_up_costs_the_records_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with MetricsWriter(tmp_path) as metrics:
        metrics.write("train", 1, {"loss": 1.0})
        monkeypatch.setattr(metrics, "_append", full)
        for step in (2, 3):
            metrics.write("train", step, {"loss": 1.0})
    assert capsys.readouterr().err.count("metrics end at step 2 (No space left on device)") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_folder_that_is_deleted_in_a_run_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Records would go to a file without a name; and TensorBoard's thread ends without a traceback."""
    folder = tmp_path / "run"
    folder.mkdir()
    with MetricsWriter(folder, config=Config()) as metrics:
        metrics.write("train", 1, {"loss": 1.0})
        while folder.exists():  # TensorBoard's thread may write to it meanwhile
            shutil.rmtree(folder, ignore_errors=True)
        for step in range(2, 30):
            metrics.write("train", step, {"loss": 1.0})
    said = capfd.readouterr().err
    assert said.count("metrics end at step 2 (the folder, or the file in it, was deleted); training goes on") == 1
    assert "Traceback" not in said


def test_a_norm_that_overflows_and_a_loss_that_is_well_again_are_named() -> None:
    config = short(precision="fp32", lr=0.01)
    dataset = build_data(config)
    strategy = prepare_strategy(World(), config, dataset)
    good = dataset.train.batch(torch.arange(8))
    assert "training diverges; lower train.lr" in locate_nonfinite(strategy, Batch(1e18 * good.inputs, good.targets))
    where = locate_nonfinite(strategy, good, torch.tensor(float("nan")))
    assert where == "rank 0: its loss; not reproduced when the batch was run again"


def test_records_up_to_the_step_that_a_run_goes_on_from_are_kept(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        for step in range(1, 7):
            metrics.write("train", step, {"loss": float(step)})
    with MetricsWriter(tmp_path, after=4) as metrics:
        metrics.write("train", 5, {"loss": 50.0})
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]
    aside = [json.loads(line)["step"] for line in (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()]
    assert aside == [5, 6]
