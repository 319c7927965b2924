"""Checkpoints: saved under any layout, loaded under any other; whole or not at all."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.checkpoint import manifest
from lockstep.checkpoint.checkpoints import LATEST, Checkpoints
from lockstep.config import GPT, Config, Data, Model, Parallel, ResNet, Train
from lockstep.data import Sampler, read_share
from lockstep.layout.world import World
from lockstep.strategies import available_strategies, strategy_named
from lockstep.training.prepare import load_data, prepare_strategy
from tests.ranks import LONG, on_ranks

TINY = GPT(d_model=12, layers=2, heads=2, context=6, vocabulary=19, dropout=0.0)
STEPS_AFTER = 10


# ---- from layout to layout -----------------------------------------------------------------------------------


def config_for(name: str, model: Model = TINY) -> Config:
    precision = "fp32" if name.startswith("deepspeed") else "fp64"
    train = Train(batch_size=6, optimizer="adamw", lr=1e-3, weight_decay=0.01, precision=precision, clip_norm=1.0)
    parallel = strategy_named(name, Parallel(bucket_mb=0.001))
    return Config(model=model, data=Data(name="synthetic", samples=60), train=train, parallel=parallel)


def go_on(world: World, config: Config, strategy: Any, first: int, steps: int) -> list[float]:
    dataset = load_data(world, config)
    sampler = Sampler(len(dataset.train), config.train.batch_size, config.train.seed)
    order = [indices for epoch in range(3) for indices in sampler.epoch(epoch)]
    share = strategy.batch_share()
    return [strategy.step(read_share(dataset.train, i, share)).loss for i in order[first : first + steps]]


def session(
    world: World, loads: list[tuple[str, str, str]], saves: list[str], base: Path, model: Model = TINY
) -> dict[Any, Any]:
    """Save with each of `saves` after 3 steps, then load (ranks, saver, loader); each goes on for 10 steps."""
    found: dict[Any, Any] = {}
    for name in saves:
        config = config_for(name, model)
        strategy = prepare_strategy(world, config, load_data(world, config))
        go_on(world, config, strategy, 0, 3)
        weights = strategy.full_state_dict()
        Checkpoints(world, base / str(world.size) / name).save(strategy, {"step": 3}, wait=True)
        found[name] = (weights, go_on(world, config, strategy, 3, STEPS_AFTER))
    for ranks, saver, loader in loads:
        config = config_for(loader, model)
        config.train.precision = "fp32" if "deepspeed" in (saver, loader) else "fp64"
        strategy = prepare_strategy(world, config, load_data(world, config))
        checkpoints = Checkpoints(world, base / ranks / saver)
        whole, damage = checkpoints.find()
        assert whole is not None
        assert damage == []
        assert checkpoints.load(whole, strategy)["step"] == 3
        weights = strategy.full_state_dict()
        found[ranks, saver, loader] = (weights, go_on(world, config, strategy, 3, STEPS_AFTER))
    return found


def check_moves(
    rounds: list[tuple[int, list[tuple[str, str, str]], list[str]]], folder: Path, timeout: float, model: Model = TINY
) -> None:
    """Each round is (ranks, loads, saves): what was saved by a round before has its weights, and goes on as it did."""
    saved: dict[tuple[str, str], Any] = {}
    for ranks, loads, saves in rounds:
        found = on_ranks(session, ranks, loads, saves, folder, model, timeout=timeout)[0]
        saved |= {(str(ranks), name): found[name] for name in saves}
        for source, saver, loader in loads:
            (weights, losses), (then, later) = found[source, saver, loader], saved[source, saver]
            moved = f"{saver} of {source} ranks -> {loader} of {ranks}"
            for name, tensor in then.items():
                assert torch.equal(weights[name], tensor.to(weights[name].dtype)), (moved, name)
            tolerance = 1e-12 if "deepspeed" not in (saver, loader) else 2e-5  # it computes in fp32
            assert losses == pytest.approx(later, abs=tolerance), moved


def between_averages(world: World, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Local SGD, its layers cut by tp, and what each rank has after saving and loading."""
    config = config_for("local_sgd")
    config.parallel = replace(config.parallel, tp=2, sync_every=4)
    first, second = (prepare_strategy(world, config, load_data(world, config)) for _ in range(2))
    go_on(world, config, first, 0, 3)
    checkpoints = Checkpoints(world, folder)
    checkpoints.save(first, {"step": 3}, wait=True)
    whole, _ = checkpoints.find()
    assert whole is not None
    checkpoints.load(whole, second)
    loaded = {name: p.detach().clone() for name, p in second.model.named_parameters()}
    return {name: p.detach().clone() for name, p in first.model.named_parameters()}, loaded


def test_local_sgd_under_tensor_parallelism_is_saved_between_two_averages(tmp_path: Path) -> None:
    """The same ranks go on with their own weights, one process with the mean of the replicas."""
    found = on_ranks(between_averages, 4, tmp_path, timeout=LONG)
    for saved, loaded in found:
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    world, config = World(), config_for("single")
    alone = prepare_strategy(world, config, load_data(world, config))
    checkpoints = Checkpoints(world, tmp_path)
    whole, _ = checkpoints.find()
    assert whole is not None
    checkpoints.load(whole, alone)
    parameters = dict(alone.model.named_parameters())
    for name in ("norm.weight", "token_embedding.weight"):
        (one, _), _, (other, _), _ = found  # tp changes fastest: the replicas of rank 0 are it and rank 2
        mean, rows = (one[name] + other[name]) / 2, len(one[name])
        assert not torch.equal(one[name], other[name]), name
        torch.testing.assert_close(parameters[name][:rows], mean)


def statistics_come_back(world: World, folder: Path) -> tuple[list[float], list[float], list[float]]:
    """Running means of a batch norm: fresh, when saved, and loaded into a fresh one."""
    settings = Train(batch_size=8, precision="fp64", lr=0.01)
    config = Config(model=ResNet(width=4), data=Data(name="synthetic", kind="images", samples=32), train=settings)
    config.parallel = Parallel(data="bucketed")
    dataset = load_data(world, config)
    first, second = (prepare_strategy(world, config, dataset) for _ in range(2))
    fresh = next(b for n, b in second.model.named_buffers() if n.endswith("running_mean")).tolist()
    for step in range(3):
        first.step(read_share(dataset.train, torch.arange(8) + 8 * step, first.batch_share()))
    first.synchronize_buffers()
    saved = next(b for n, b in first.model.named_buffers() if n.endswith("running_mean")).tolist()
    checkpoints = Checkpoints(world, folder)
    checkpoints.save(first, {"step": 3}, wait=True)
    whole, _ = checkpoints.find()
    assert whole is not None
    checkpoints.load(whole, second)
    return fresh, saved, next(b for n, b in second.model.named_buffers() if n.endswith("running_mean")).tolist()


def test_running_statistics_are_saved_and_loaded(tmp_path: Path) -> None:
    for fresh, saved, loaded in on_ranks(statistics_come_back, 2, tmp_path):
        assert saved != fresh
        assert loaded == saved


def deepspeed_in_fp16(world: World, folder: Path) -> None:
    """The engine makes its optimizer's state in a step of its own when it loads, under its own scale of the loss."""
    config = config_for("deepspeed")
    config.train.precision = "fp16"
    first, second = (prepare_strategy(world, config, load_data(world, config)) for _ in range(2))
    go_on(world, config, first, 0, 30)  # the scale finds its way down in the first ones
    checkpoints = Checkpoints(world, folder)
    checkpoints.save(first, {"step": 30}, wait=True)
    whole, _ = checkpoints.find()
    assert whole is not None
    checkpoints.load(whole, second)
    before, after = first.state.state_dict(), second.state.state_dict()  # whole on rank 0
    assert after.keys() == before.keys()
    moments = [name for name in before if name.endswith("exp_avg")]
    assert len(moments) == (len(list(first.model.parameters())) if world.is_main else 0)
    assert all(torch.equal(before[name], after[name]) and before[name].any() for name in moments)


@pytest.mark.skipif("deepspeed" not in available_strategies(), reason="DeepSpeed is not installed")
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="DeepSpeed knows no fp16 on this CPU")
def test_deepspeed_resumes_in_fp16(tmp_path: Path) -> None:
    on_ranks(deepspeed_in_fp16, 2, tmp_path, timeout=LONG)


# ---- whole or not at all -------------------------------------------------------------------------------------


def saved_twice(folder: Path) -> tuple[World, Any, Checkpoints]:
    """One process with two checkpoints, steps 1 and 2."""
    world, config = World(), config_for("single")
    strategy = prepare_strategy(world, config, load_data(world, config))
    checkpoints = Checkpoints(world, folder, asynchronous=False)
    for step in (1, 2):
        go_on(world, config, strategy, step, 1)
        checkpoints.save(strategy, {"step": step})
    assert checkpoints.problem is None
    return world, strategy, checkpoints


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "truncated": (lambda f: f.write_bytes(f.read_bytes()[:-1]), "bytes instead of"),
    "flipped": (flip, "its checksum differs"),
    "missing": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str, name: str) -> None:
    world, strategy, checkpoints = saved_twice(tmp_path)
    hurt, words = DAMAGES[damage]
    file = tmp_path / "step-00000002" / name
    hurt(file)
    found, told = checkpoints.find()
    if name == "manifest.json" and damage == "flipped" and found == tmp_path / "step-00000002":
        return  # a bit of white space: it still says the same
    assert found == tmp_path / "step-00000001"
    assert str(file) in told[0] or name == "manifest.json"
    assert words in told[0] or name == "manifest.json"
    assert checkpoints.load(found, strategy)["step"] == 1
    assert world.is_main


def test_old_checkpoints_go_and_leftovers_too(tmp_path: Path) -> None:
    world, strategy, _ = saved_twice(tmp_path)
    (tmp_path / ".step-00000003.part").mkdir()
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.old")  # killed while it was being replaced
    checkpoints = Checkpoints(world, tmp_path, keep_last=2, asynchronous=False)
    assert len(checkpoints.all()) == 1
    checkpoints.save(strategy, {"step": 3})
    assert [f.name for f in checkpoints.all()] == ["step-00000002", "step-00000003"]
    assert (tmp_path / LATEST).read_text().strip() == "step-00000003"


def test_a_disk_that_is_full_is_named_also_where_torch_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfinished() -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    checkpoints = Checkpoints(World(), tmp_path)
    assert "unexpected pos" in str(checkpoints._attempt(unfinished))  # there is room: it is something else
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    assert checkpoints._attempt(unfinished) == f"{tmp_path}: No space left on device"


@pytest.mark.alone
def test_a_full_disk_fails_the_save_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, strategy, checkpoints = saved_twice(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place in (os, "fsync"), (manifest, "describe"):
        with monkeypatch.context() as patch:
            patch.setattr(*place, full)
            checkpoints.save(strategy, {"step": 3})
        assert checkpoints.problem is not None
        assert "No space left on device" in checkpoints.problem
        assert sorted(f.name for f in tmp_path.iterdir()) == [LATEST, "step-00000001", "step-00000002"]
    found, damage = checkpoints.find()
    assert (found, damage) == (tmp_path / "step-00000002", [])


TRAIN = (
    *(sys.executable, "-m", "lockstep", "train", "--model.name", "mlp", "--data.name", "synthetic", "--nproc", "2"),
    *("--model.width", "64", "--data.kind", "regression", "--data.shape", "8", "--data.classes", "2"),
    *("--parallel.data", "zero3", "--train.steps", "100000", "--checkpoint.every", "3"),
    *("--train.lr", "0.001"),
)


def start_training(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [*TRAIN, "--run-dir", str(folder), "--resume", "auto"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return process


def wait_for_checkpoint(folder: Path, after: str) -> str:
    latest, deadline = folder / "checkpoints" / LATEST, time.monotonic() + LONG
    while time.monotonic() < deadline:
        if latest.exists() and (name := latest.read_text().strip()) > after:
            return name
        time.sleep(0.02)
    raise AssertionError("no checkpoint within 60 s")


@pytest.fixture
def _no_semaphores_left() -> Iterator[None]:
    """Killed with everything around it, Python cannot take away the names of its semaphores."""
    before = set(Path("/dev/shm").glob("sem.mp-*"))
    yield
    for name in set(Path("/dev/shm").glob("sem.mp-*")) - before:
        name.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_semaphores_left")
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint_and_sigterm_saves(tmp_path: Path) -> None:
    """Killed while it saves every third step; then ended by SIGTERM; each time the next goes on."""
    process = start_training(tmp_path)
    reached = wait_for_checkpoint(tmp_path, "")
    time.sleep(random.uniform(0.0, 0.5))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    found, damage = Checkpoints(World(), tmp_path / "checkpoints").find()
    assert damage == []
    assert found is not None
    assert found.name >= reached
    reached = found.name
    process = start_training(tmp_path)
    wait_for_checkpoint(tmp_path, reached)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "stopped by SIGTERM and saved" in output
    found, damage = Checkpoints(World(), tmp_path / "checkpoints").find()
    assert found is not None
    step = json.loads((found / "run.json").read_text())["step"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert step >= max(r["step"] for r in records)  # nothing that was reported is lost
