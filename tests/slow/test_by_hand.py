"""What was only ever run by hand: torchrun without a folder, DeepSpeed's offloads and launcher, long runs, delays."""

import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from lockstep.comm.shm import board, mailbox
from lockstep.config import GPT, Config, Data, Train
from lockstep.data import read_share
from lockstep.layout.world import World
from lockstep.strategies import available_strategies, strategy_named
from lockstep.training.prepare import load_data, prepare_strategy
from tests.ranks import LONG, left_in_shm, on_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TRAIN = [
    *("train", "--model.name", "mlp", "--model.layers", "3", "--model.width", "16", "--device", "cpu"),
    *("--data.name", "synthetic", "--data.kind", "regression", "--data.shape", "8", "--data.classes", "2"),
    *("--train.lr", "0.001", "--train.batch-size", "32"),
]
has_deepspeed = pytest.mark.skipif("deepspeed" not in available_strategies(), reason="DeepSpeed is not installed")


def command(words: list[str], folder: Path, timeout: float = LONG) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_under_torchrun_one_rank_names_the_folder(tmp_path: Path) -> None:
    """Three ranks have one folder, with a whole checkpoint."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone"]
    words = [*torchrun, "-m", "lockstep", *TRAIN, "--train.steps", "6", "--checkpoint.every", "3"]
    ended = command(words, tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    (run,) = (tmp_path / "runs").iterdir()
    assert command([sys.executable, "-m", "lockstep", "export", str(run)], tmp_path).returncode == 0


def test_resume_auto_takes_the_newest_that_fits_and_harms_none(tmp_path: Path) -> None:
    lockstep = [sys.executable, "-m", "lockstep"]
    first = [*lockstep, *TRAIN, "--train.steps", "4", "--checkpoint.every", "2"]
    assert command(first, tmp_path).returncode == 0
    (old,) = (tmp_path / "runs").iterdir()
    config = (old / "config.yaml").read_text()
    other = command([*first, "--model.width", "8", "--resume", "auto"], tmp_path)
    assert other.returncode == 0
    assert "is not resumed: it has model.width 16, and this run 8" in other.stdout
    assert (old / "config.yaml").read_text() == config
    again = command([*first, "--train.steps", "6", "--resume", "auto"], tmp_path)
    assert "resumed at step 4" in again.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 2
    wrong = command([*first, "--model.width", "8", "--resume", str(old)], tmp_path)
    assert wrong.returncode == 2
    assert (old / "config.yaml").read_text().replace("steps: 6", "steps: 4") == config
    assert command([*lockstep, "export", str(old)], tmp_path).returncode == 0


def test_two_runs_never_write_to_one_folder(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lockstep", *TRAIN, "--train.steps", "100000", "--run-dir", "here"]
    running = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + LONG
    while not (tmp_path / "here" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    second = command(words, tmp_path)
    assert second.returncode == 2
    assert f"here is being written by another run (process {running.pid} on" in second.stderr
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=LONG)
    assert "stopped by SIGTERM and saved" in output


@pytest.mark.parametrize("how", ["to the end", "stopped"])
def test_a_save_that_failed_is_no_success(tmp_path: Path, how: str) -> None:
    """A file stands where the checkpoints' folder should be: exit status 1, and the last line says so."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    steps = "8" if how == "to the end" else "100000"
    words = [sys.executable, "-m", "lockstep", *TRAIN, "--train.steps", steps, "--run-dir", "run", "--checkpoint.every"]
    process = subprocess.Popen(
        [*words, "1000" if how == "stopped" else "4"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if how == "stopped":
        deadline = time.monotonic() + LONG
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 1, output
    assert "the last checkpoint was not saved" in output.splitlines()[-1]
    assert "and saved" not in output


def test_a_rank_that_is_stopped_while_saving_is_not_waited_for_for_an_hour(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lockstep", *TRAIN, "--nproc", "2", "--timeout", "8", "--train.steps", "100000"]
    words += ["--checkpoint.every", "5", "--checkpoint.no-asynchronous", "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + LONG
        while not (tmp_path / "run" / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        (server,) = [c for c in psutil.Process(process.pid).children() if "forkserver" in " ".join(c.cmdline())]
        ranks = server.children()
        ranks[1].send_signal(signal.SIGSTOP)
        start = time.monotonic()
        process.communicate(timeout=LONG)
        assert process.returncode == 1
        assert time.monotonic() - start < 100  # two time-outs, and the agent's 30 s for a process that does not end
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


# ---- DeepSpeed -----------------------------------------------------------------------------------------------------


@has_deepspeed
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_deepspeed_offloads_to_the_host(optimizer: str, tmp_path: Path) -> None:
    compiled = any(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("**/cpu_adam.so"))
    if optimizer == "adamw" and not compiled and "LOCKSTEP_COMPILE" not in os.environ:
        pytest.skip("DeepSpeed would compile its Adam for two minutes: LOCKSTEP_COMPILE=1 lets it")
    words = [sys.executable, "-m", "lockstep", *TRAIN, "--nproc", "2", "--parallel.data", "deepspeed"]
    words += ["--parallel.offload", "cpu", "--train.optimizer", optimizer, "--train.steps", "4"]
    ended = command(words, tmp_path, timeout=LONG)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


@has_deepspeed
def test_deepspeed_offloads_to_nvme(tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("libaio is not installed")
    words = [sys.executable, "-m", "lockstep", *TRAIN, "--nproc", "2", "--parallel.data", "deepspeed"]
    words += ["--parallel.offload", "nvme", "--parallel.nvme-path", str(tmp_path / "nvme"), "--train.steps", "4"]
    (tmp_path / "nvme").mkdir()
    ended = command([*words, "--train.optimizer", "adamw"], tmp_path, timeout=LONG)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


@has_deepspeed
def test_deepspeeds_own_launcher(tmp_path: Path) -> None:
    settings = "deepspeed/zero2.json"
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", "--bind_cores_to_rank"]
    words = [*launcher[:-1], "--module", "lockstep", *TRAIN, "--train.steps", "4", "--deepspeed_config", settings]
    found = subprocess.run(
        words, capture_output=True, text=True, timeout=LONG, cwd=tmp_path, env={**os.environ, "DS_ACCELERATOR": "cpu"}
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
    assert "strategy deepspeed, 2 ranks" in found.stdout


# ---- long runs, and random delays ----------------------------------------------------------------------------------


def long_run(world: World, name: str) -> list[tuple[int, int, int]]:
    """(memory in KiB, descriptors, segments) after 100, 300 and 500 steps."""
    config = Config(
        model=GPT(d_model=16, layers=2, heads=2, context=8, vocabulary=31),
        data=Data(name="synthetic", samples=64),
        train=Train(batch_size=8, optimizer="adamw", lr=1e-3),
        parallel=strategy_named(name),
    )
    dataset = load_data(world, config)
    strategy = prepare_strategy(world, config, dataset)
    batch = read_share(dataset.train, torch.arange(8), strategy.batch_share())
    process, found = psutil.Process(), []
    for step in range(211):
        result = strategy.step(batch)
        if step in (70, 140, 210):
            assert result.loss == result.loss
            gc.collect()
            found.append((process.memory_info().rss // 1024, process.num_fds(), len(left_in_shm())))
    return found


@pytest.mark.parametrize("name", ["bucketed+topk", "zero3", "fsdp"])
def test_a_long_run_holds_memory_descriptors_and_segments(name: str) -> None:
    for rank, (early, middle, late) in enumerate(on_ranks(long_run, 2, name, timeout=LONG)):
        assert late[0] - middle[0] < 8_192, f"rank {rank}: memory {early[0]}, {middle[0]}, {late[0]} KiB"
        assert late[1:] == middle[1:] == early[1:], f"rank {rank}: descriptors and segments"


def delayed(call: Callable[..., Any], seed: int) -> Callable[..., Any]:
    dice = random.Random(seed)

    def late(*args: Any, **kwargs: Any) -> Any:
        if dice.random() < 0.05:
            time.sleep(dice.random() * 0.004)
        return call(*args, **kwargs)

    return late


def with_delays(world: World) -> int:
    """All kinds of collectives in a row, on ranks that dawdle at random inside board and mailbox; wrong results."""
    with pytest.MonkeyPatch.context() as patch:
        for number, (cls, method) in enumerate(
            (
                (board.Board, "take"),
                (board.Board, "show"),
                (board.Board, "look"),
                (board.Board, "release"),
                (mailbox.Mailbox, "send"),
                (mailbox.Mailbox, "take"),
            )
        ):
            patch.setattr(cls, method, delayed(getattr(cls, method), 100 * world.rank + number))
        group = dist.new_group()
        wrong, size, rank = 0, world.size, world.rank
        total = size * (size - 1) / 2
        for turn in range(60):
            length = (1, 1000, 300_000)[turn % 3]
            row = torch.full((length,), float(rank))
            work = dist.all_reduce(row, group=group, async_op=True)
            shared = group.shared_empty(64, torch.float32) if turn % 20 == 0 else None
            work.wait()
            wrong += not bool((row == total).all())
            if shared is not None:
                shared.fill_(rank)
                dist.all_reduce(shared, group=group)
                wrong += not bool((shared == total).all())
            everyone = [torch.empty(5) for _ in range(size)]
            dist.all_gather(everyone, torch.full((5,), float(rank + turn)), group=group)
            wrong += any(bool((t != r + turn).any()) for r, t in enumerate(everyone))
            send = dist.isend(torch.full((7,), float(rank)), (rank + 1) % size, group=group)
            got = torch.empty(7)
            dist.recv(got, (rank - 1) % size, group=group)
            send.wait()
            wrong += not bool((got == (rank - 1) % size).all())
    return wrong


def test_random_delays_at_eight_ranks_change_nothing() -> None:
    assert on_ranks(with_delays, 8, timeout=LONG) == [0] * 8
