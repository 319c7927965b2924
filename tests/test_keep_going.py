"""`lockstep train --keep-going`: ranks are killed, stopped and lost in every moment; the run is that of one process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.config import GPT, MLP, Checkpoint, Config, Data, Lora, Metrics, Parallel, ResNet, Train
from lockstep.data import Streamed
from lockstep.errors import RankError, UserError
from lockstep.inference.export import export_weights
from lockstep.launch import Launch, World
from lockstep.launch.keep_going import LOSSES_AT_ONE_STEP, Losses, run_keeping_going
from lockstep.strategies import STRATEGIES
from lockstep.strategies.hand_over import check_can_be_handed_over, check_keeps_going
from lockstep.training.attempt import read_status, step_in_progress
from lockstep.training.keep_going import train_keeping_going
from lockstep.training.loop import train
from lockstep.training.result import TrainResult

Kill = tuple[int, tuple[int, ...], signal.Signals]
"""(in which step, which ranks, how)"""
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
STEPS = 60
CONFIG = Config(
    MLP(layers=4, width=32),
    Data("digits"),
    Train(steps=STEPS, batch_size=13, optimizer="adamw", lr=1e-3, precision="fp64", evaluate_every=0, check_replicas=7),
    Parallel("bucketed"),
    checkpoint=Checkpoint(every=25),
    metrics=Metrics(tensorboard=False),
)


def slowly(kind: str, step: int, values: dict[str, Any]) -> None:
    """A callback of the first rank: the others wait for it, and there is time to kill."""
    time.sleep(0.03)


def lost_behind_step_ten(kind: str, step: int, values: dict[str, Any]) -> None:
    """A callback that ends the first rank where an evaluation and a checkpoint are due, before they are done."""
    if (kind, step) == ("train", 10):
        os.kill(os.getpid(), KILL)


def kill_in_time(run: Path, kills: list[Kill], over: threading.Event) -> None:
    for step, ranks, how in kills:
        while not over.is_set():
            status = read_status(run) if run.exists() else None
            there = status is not None and status.state == "running" and len(status.ranks) > max(ranks)
            if there and step_in_progress(run) >= step:
                break
            time.sleep(0.005)
        if over.is_set():
            return
        assert status is not None
        for rank in ranks:
            os.kill(status.ranks[rank][1], how)
        time.sleep(0.3)


def trained(folder: Path, kills: list[Kill], ranks: int = 3, **changes: Any) -> list[TrainResult]:
    """The results of the ranks that were there at the end."""
    callbacks = tuple(f"{__name__}:{one.__name__}" for one in (slowly, *changes.pop("callbacks", ())))
    train = replace(changes.pop("train", CONFIG.train), log_every=1, callbacks=callbacks)
    config = replace(CONFIG, train=train, **changes)
    over = threading.Event()
    killer = threading.Thread(target=kill_in_time, args=(folder, kills, over))
    killer.start()
    try:
        asked = config, str(folder), None
        return run_keeping_going(train_keeping_going, *asked, launch=Launch(nproc=ranks, device="cpu"))
    finally:
        over.set()
        killer.join()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process."""
    return weights_of_one(tmp_path_factory.mktemp("one"))


def weights_of_one(home: Path, **changes: Any) -> dict[str, torch.Tensor]:
    config = replace(CONFIG, **changes, parallel=Parallel("single"))
    train(World(), config, home / "run", quiet=True)
    return weights(home / "run")


def weights(run: Path) -> dict[str, torch.Tensor]:
    file = run / "weights.safetensors"
    export_weights(run, file)
    return load_file(file)


def check_same(run: Path, expected: dict[str, torch.Tensor]) -> None:
    found = weights(run)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-10 * max(1.0, float(tensor.abs().max())), name


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


@pytest.mark.parametrize(
    ("kills", "ranks"),
    [
        ([(10, (1,), KILL), (30, (0,), KILL)], 3),
        pytest.param([(15, (0, 2), KILL)], 3, marks=pytest.mark.slow),
        pytest.param([(8, (1,), KILL), (40, (0,), KILL)], 2, marks=pytest.mark.slow),
        pytest.param([(20, (1,), STOP)], 2, marks=pytest.mark.slow),
    ],
    ids=["one after the other", "two at once", "of two", "stopped"],
)
def test_the_run_is_that_of_one_process(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], kills: list[Kill], ranks: int
) -> None:
    run = tmp_path / "run"
    results = trained(run, kills, ranks)
    assert results[0].steps == STEPS
    check_same(run, undisturbed)
    assert len(records(run, "regroup")) >= len(kills)
    steps = [r["step"] for r in records(run, "train")]
    assert steps == sorted(set(steps))  # none twice
    # The loss of a step is summed over the ranks behind it: where one was lost just then, no rank has it.
    assert len(steps) >= STEPS - len(kills)
    status = read_status(run)
    assert status is not None
    assert status.state == "done"


@pytest.mark.slow
@pytest.mark.parametrize("data", ["flat", "overlap"])
def test_under_other_engines(tmp_path: Path, undisturbed: dict[str, torch.Tensor], data: str) -> None:
    trained(tmp_path / "run", [(10, (1,), KILL), (35, (0,), KILL)], parallel=Parallel(data))
    check_same(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_statistics_of_a_step_that_was_not_finished_are_not_counted_twice(tmp_path: Path) -> None:
    """A network with running statistics counts its forward passes."""
    model = ResNet(stages=(1,), width=4, norm="batch")
    run = tmp_path / "run"
    trained(run, [(10, (1,), KILL)], 2, model=model)
    tracked = [t for name, t in weights(run).items() if name.endswith("num_batches_tracked")]
    assert tracked
    assert all(int(t) == STEPS for t in tracked)


@pytest.mark.slow
def test_killed_while_it_joins_and_while_it_saves(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    """A replacement is killed as soon as it is there, and ranks in the step that is saved."""
    run = tmp_path / "run"
    kills: list[Kill] = [(10, (1,), KILL), (10, (2,), KILL), (25, (0,), KILL), (26, (1,), KILL), (50, (2,), KILL)]
    trained(run, kills, checkpoint=Checkpoint(every=5, asynchronous=True))
    check_same(run, undisturbed)


@pytest.mark.slow
def test_all_lost_at_once_is_said(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"all ranks were lost, and with them the run's state") as error:
        trained(tmp_path / "run", [(10, (0, 1), KILL)], 2)
    assert "--resume auto" in str(error.value)


def failing(step: int, steps: int) -> float:
    """A schedule."""
    if step == 5:
        raise RuntimeError("this step fails every time")
    return 1.0


@pytest.mark.slow
def test_a_step_that_fails_on_all_ranks_ends_the_run(tmp_path: Path) -> None:
    config = replace(CONFIG, train=replace(CONFIG.train, schedule=f"{__name__}:failing"))
    with pytest.raises(RankError, match=r"all ranks were lost, .*: this step fails every time"):
        run_keeping_going(
            train_keeping_going, config, str(tmp_path / "run"), None, launch=Launch(nproc=2, device="cpu")
        )


def test_losses_at_one_step_are_limited() -> None:
    losses = Losses()
    for step in ("3", "3", "4"):
        losses.add(step, "killed")
    for _ in range(LOSSES_AT_ONE_STEP - 1):
        losses.add("4", "killed again")
    with pytest.raises(RankError, match=r"5 ranks were lost behind step 4, .* the first: killed"):
        losses.add("4", "and again")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"lora": Lora(rank=2, targets=("1", "2"))},
        {"model": GPT(d_model=16, layers=2, heads=2, context=8), "data": Data("text", max_bytes=20_000)},
        {"train": {"ema": 0.9}},
        {"train": {"optimizer": "adamw_8bit"}},
        {"train": {"accumulation": 2, "clip_norm": 0.5, "batch_size": 26}},
    ],
    ids=["lora", "text", "ema", "adamw_8bit", "accumulated"],
)
def test_what_is_handed_over(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = {**changes, "train": replace(CONFIG.train, **changes.get("train", {}))}
    expected = weights_of_one(tmp_path / "one", **changes)
    trained(tmp_path / "run", [(10, (1,), KILL), (30, (0,), KILL)], **changes)
    check_same(tmp_path / "run", expected)


@pytest.mark.slow
def test_what_is_due_behind_a_step_is_done(tmp_path: Path) -> None:
    """A checkpoint and an evaluation at every fifth step, with a rank lost in most of them."""
    run = tmp_path / "run"
    train = replace(CONFIG.train, evaluate_steps=5)
    kills: list[Kill] = [(step, (step % 3,), KILL) for step in (5, 11, 16, 21, 30, 41)]
    trained(run, kills, train=train, checkpoint=Checkpoint(every=5, keep_last=0))
    assert [r["step"] for r in records(run, "test")] == list(range(5, STEPS + 1, 5))
    saved = sorted(int(f.name.removeprefix("step-")) for f in (run / "checkpoints").glob("step-*"))
    # A save that was cut short is made up for soon; none is given up.
    assert saved[-1] == STEPS
    assert max(b - a for a, b in pairwise([0, *saved])) <= 10


def test_what_was_due_when_a_rank_was_lost_is_done(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = replace(CONFIG.train, evaluate_steps=10, steps=15)
    trained(run, [], train=train, checkpoint=Checkpoint(every=10, keep_last=0), callbacks=(lost_behind_step_ten,))
    assert [r["step"] for r in records(run, "test")] == [10, 15]
    assert sorted(f.name for f in (run / "checkpoints").glob("step-*")) == ["step-00000010", "step-00000015"]


def test_experts_and_streams_are_refused() -> None:
    strategy: Any = SimpleNamespace(cut=SimpleNamespace(has_experts=True))
    plain: Any = SimpleNamespace(cut=SimpleNamespace(has_experts=False))
    stream: Any = SimpleNamespace(name="mine", train=Streamed.__new__(Streamed))
    with pytest.raises(UserError, match="mixture of experts"):
        check_can_be_handed_over(strategy, stream)
    with pytest.raises(UserError, match=r"mine is a stream; use --max-restarts"):
        check_can_be_handed_over(plain, stream)


# ---- the command ---------------------------------------------------------------------------------------------------

COMMAND = [
    *(sys.executable, "-m", "lockstep", "train", "digits_cnn", "--nproc", "2", "--device", "cpu", "--keep-going"),
    *("--train.steps", "100000", "--train.evaluate-every", "0", "--checkpoint.every", "100000"),
]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_launcher_is_stopped(tmp_path: Path, how: signal.Signals) -> None:
    """Stopped in good order, it saves; killed, it takes its ranks along."""
    run = tmp_path / "run"
    command = [*COMMAND, "--run-dir", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        deadline = time.monotonic() + 60
        while step_in_progress(run) < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        status = read_status(run)
        assert status is not None
        launcher.send_signal(how)
        said, _ = launcher.communicate(timeout=60)
    if how != signal.SIGKILL:
        assert f"stopped by {'Ctrl-C' if how == signal.SIGINT else 'SIGTERM'} and saved" in said
    assert "Traceback" not in said
    deadline = time.monotonic() + 10
    while any(is_running(pid) for _, pid in status.ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for _, pid in status.ranks)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (
            Parallel("zero3"),
            r"--keep-going needs ranks of which each can .*, bucketed\), and parallel.data zero3 has none",
        ),
        (Parallel("bucketed", tp=2), "and parallel.tp 2 has none; use --max-restarts"),
        (Parallel("bucketed", compression="topk"), "bucketed with these options has none"),
        (Parallel("bucketed", replicate=3), "changes how many copies there are, and parallel.replicate is 3"),
        (Parallel("local_sgd"), "parallel.data local_sgd has none"),
    ],
)
def test_what_cannot_lose_a_rank_is_refused(parallel: Parallel, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_keeps_going(Config(parallel=parallel))


def test_only_strategies_with_whole_copies_survive_losses() -> None:
    for name, engine in STRATEGIES.items():
        if engine.survives_losses:
            assert not any(engine.facts(Parallel(name)).divides), name


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from lockstep.cli import main

    for flags, said in (
        (["--nproc", "1"], "--keep-going needs another rank that goes on, and --nproc is 1; give 2 or more"),
        (["--nproc", "2", "--backend", "gloo"], "for ranks that share memory, and --backend is gloo; leave it out"),
        (["--nproc", "2", "--data.workers", "2"], "does not go with data.workers 2"),
        (["--nproc", "2", "--max-restarts", "3"], "leave --max-restarts 3 out"),
        (["--nproc", "2", "--parallel.data", "zero1"], "parallel.data zero1 has none"),
    ):
        assert main(["train", "digits_cnn", "--device", "cpu", "--keep-going", *flags]) == 2
        assert said in capsys.readouterr().err
