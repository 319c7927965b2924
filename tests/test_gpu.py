"""On a GPU: one is enough, its ranks share it over real NCCL."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lockstep.bench.comm import bench_comm
from lockstep.bench.pairs import bench_pairs
from lockstep.bench.trial import COLLECTIVES, Sweep
from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.comm.algorithms import ALGORITHMS
from lockstep.comm.by_hand import all_reduce_over
from lockstep.comm.collectives import all_reduce_async, barrier
from lockstep.comm.wire import Wire
from lockstep.config import GPT, Config, Data, Train, load_config
from lockstep.data import Batch, build_data, read_share
from lockstep.doctor.running import look_at
from lockstep.errors import RankError
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.models.loss import CrossEntropy
from lockstep.profile import profile_steps
from lockstep.profile.nvtx import mark_steps
from lockstep.strategies import ParallelModel, available_strategies, strategy_named
from lockstep.training.attempt import read_status, step_in_progress
from lockstep.training.loop import train
from lockstep.training.prepare import prepare_strategy
from lockstep.verify import Request, verify
from tests.gpu import NEEDS_GPU, on_gpu, short_gpt

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(("ranks", "precision"), [(2, "fp64"), (4, "fp64"), (2, "fp32")])
def test_every_strategy_equals_one_process_on_nccl(ranks: int, precision: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    names = [n for n in available_strategies() if n != "single"]
    for verdict in on_gpu(verify, ranks, Request(names, steps=6, precision=precision))[0]:
        assert verdict.passed, f"{verdict.strategy}: {verdict.failures}"


def test_one_and_two_ranks_train_alike() -> None:
    config = load_config("configs/digits_cnn.yaml")
    one, two = (on_gpu(train, ranks, config, None, True)[0] for ranks in (1, 2))
    assert min(one.test_accuracy, two.test_accuracy) >= 0.98
    assert one.losses == pytest.approx(two.losses, abs=5e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_gpt_learns_in_mixed_precision(precision: str) -> None:
    model = GPT(d_model=64, layers=2, heads=4, context=64)
    settings = Train(steps=40, batch_size=32, optimizer="adamw", lr=3e-3, precision=precision, log_every=1)
    config = Config(model, Data(name="text", max_bytes=500_000), settings)
    result = on_gpu(train, 2, config, None, True)[0]
    assert result.losses[-1] < 0.7 * result.losses[0]


def test_compile_on_a_gpu() -> None:
    config = short_gpt("bucketed", "none", "bf16")
    config.model.vocabulary = 1024  # type: ignore[union-attr]  # enough for our own cross entropy
    plain = on_gpu(train, 1, config, None, True)[0].losses
    config.train.compile = "blocks"
    assert on_gpu(train, 1, config, None, True)[0].losses == pytest.approx(plain, abs=0.02)
    config.model.own_gelu, config.model.residual = True, "compute"  # type: ignore[union-attr]
    for name in ("bucketed", "zero3", "fsdp"):
        config.parallel = strategy_named(name)
        ranks = 1 if name == "bucketed" else 2
        assert on_gpu(train, ranks, config, None, True)[0].losses == pytest.approx(plain, abs=0.05), name


def check_kernels(world: World) -> None:

    from lockstep.models.kernels.cross_entropy import cross_entropy
    from lockstep.models.kernels.gelu import bias_gelu

    torch.manual_seed(0)
    for dtype, rows, width in ((torch.bfloat16, 33, 50257), (torch.float32, 7, 4096), (torch.float16, 64, 50304)):
        logits = (3 * torch.randn(rows, width, device=world.device)).to(dtype).requires_grad_()
        targets = torch.randint(width, (rows,), device=world.device)
        targets[:9:2] = logits[:9:2].argmax(-1)
        targets[3] = -100
        expected = F.cross_entropy(logits.float(), targets, reduction="sum")
        (theirs,) = torch.autograd.grad(expected * 0.3, logits)
        loss, correct = cross_entropy(logits, targets, -100)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        assert int(correct) == int((logits.argmax(-1) == targets).sum())
        (mine,) = torch.autograd.grad(loss * 0.3, logits)
        torch.testing.assert_close(mine, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7)
        (theirs,) = torch.autograd.grad(CrossEntropy(1e-2)(logits.float(), targets), logits)
        (mine,) = torch.autograd.grad(cross_entropy(logits, targets, -100, 1e-2)[0], logits)
        torch.testing.assert_close(mine, theirs, rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-6)
    for dtype, shape in ((torch.bfloat16, (3, 301, 6400)), (torch.float32, (1, 5)), (torch.float16, (1000, 3072))):
        x = torch.randn(shape, device=world.device, dtype=dtype, requires_grad=True)
        bias = torch.randn(shape[-1], device=world.device, requires_grad=True)
        slope = torch.randn_like(x)
        expected = F.gelu(x.float() + bias, approximate="tanh")
        right = (expected.to(dtype), *torch.autograd.grad(expected, (x, bias), slope.float()))
        for function in (bias_gelu, torch.compile(bias_gelu, fullgraph=True)):
            y = function(x, bias)
            got = (y, *torch.autograd.grad(y, (x, bias), slope))
            tolerance = 1e-4 if dtype == torch.float32 else 2e-2
            for a, b in zip(got, right, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * shape[-1] ** 0.5 / 30)


def test_kernels_by_hand() -> None:
    on_gpu(check_kernels, 1)


def new_strategy(world: World, name: str, precision: str) -> tuple[ParallelModel, Batch]:
    config = short_gpt(name, "none", precision)
    dataset = build_data(config, world.device)
    strategy = prepare_strategy(world, config, dataset)
    return strategy, read_share(dataset.train, torch.arange(8), strategy.batch_share())


def check_no_wait(world: World, name: str) -> None:
    """After some steps, one more under a watch that fails at anything that makes the host wait for the device."""
    strategy, batch = new_strategy(world, name, "bf16")
    for _ in range(3):
        strategy.step(batch)
    torch.cuda.set_sync_debug_mode("error")
    result = strategy.step(batch)
    torch.cuda.set_sync_debug_mode("default")
    assert result.loss == result.loss, name
    assert not result.skipped


def check_nan(world: World, name: str) -> None:
    """Rank 1's loss is not a number: nobody moves, and the step after it is a good one."""
    strategy, batch = new_strategy(world, name, "fp32")
    strategy.step(batch)
    before, measure = strategy.full_state_dict(), strategy.worker.measure
    if world.rank == 1:

        def broken(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss, correct = measure(outputs, targets)
            return loss * float("nan"), correct

        strategy.worker.measure = broken
    assert strategy.step(batch).skipped, name
    assert all(torch.equal(now, before[n]) for n, now in strategy.full_state_dict().items()), name
    strategy.worker.measure = measure
    assert not strategy.step(batch).skipped, name
    assert any(not torch.equal(now, before[n]) for n, now in strategy.full_state_dict().items()), name


def communication(world: World, name: str) -> tuple[float | None, float]:
    """(total, exposed) seconds of one step."""
    strategy, batch = new_strategy(world, name, "fp32")
    strategy.ledger.sees_ends = True
    for _ in range(3):
        strategy.step(batch)
    torch.cuda.synchronize()
    return strategy.ledger.busy_seconds(), strategy.ledger.exposed_seconds()


def check_steps(world: World) -> dict[str, tuple[float | None, float]]:
    for name in ("single", "bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp"):
        check_no_wait(world, name)
    for name in ("bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp"):
        check_nan(world, name)
    names = ("naive", "flat", "overlap", "bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp", "bucketed+ring")
    return {name: communication(world, name) for name in names}


def test_steps_on_a_gpu() -> None:
    """None makes the host wait, a NaN on one rank stops all, and the ends of all collectives are seen."""
    for name, (total, exposed) in on_gpu(check_steps, 2)[0].items():
        assert total is not None, name
        assert 0 < exposed < 1.5 * total, name


def marked(world: World) -> int:
    return mark_steps(world, short_gpt("bucketed", "none"), 2, 1)


def profiled(world: World, folder: Path) -> None:
    profile_steps(world, short_gpt("bucketed", "none"), 2, 2, folder / "trace.json.gz", folder / "memory.pickle")


def test_steps_are_marked_for_nsight() -> None:
    assert all(parameters > 0 for parameters in on_gpu(marked, 2))


def test_a_profile_shows_kernels_and_memory(tmp_path: Path) -> None:
    on_gpu(profiled, 2, tmp_path)
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    for rank in (0, 1):
        names = {e["name"] for e in events if e["pid"] == rank}
        assert any("nccl" in name.lower() for name in names)
        assert any(name.startswith("all-reduce of bucket 0") for name in names)
    assert (tmp_path / "memory.pickle").stat().st_size > 0


def every_algorithm(world: World) -> None:
    """On NCCL directly, and over gloo, which moves no CUDA tensors, staged through the host."""
    gloo = dist.new_group(backend="gloo")
    for wire in (Wire(), Wire(gloo)):
        barrier(wire.group)  # NCCL's first call must be everybody's
        for algorithm in (*ALGORITHMS, "auto"):
            for length in (0, 1, 7, 1_000_003):
                tensor = (torch.arange(length, device=world.device) % 5 + world.rank).float()
                total = torch.arange(length, device=world.device) % 5 * world.size + sum(range(world.size))
                all_reduce_over(wire, tensor, algorithm)
                assert torch.equal(tensor, total.float()), (algorithm, length)
    tensor = torch.full((1000,), float(world.rank), device=world.device)
    pending = all_reduce_async(tensor, algorithm="ring")
    pending.wait()
    assert bool((tensor == sum(range(world.size))).all())


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_reduce_by_hand_on_cuda_tensors(ranks: int) -> None:
    on_gpu(every_algorithm, ranks)


def every_collective(world: World) -> list[int | None]:
    rows = bench_comm(world, list(COLLECTIVES), ["nccl"], ["native", "ring", "tree"], Sweep((64, 1 << 20), 3, 1))
    pairs = bench_pairs(world, "nccl", 2)
    assert pairs.bandwidth[0][1] > 0
    return [row.wrong for row in rows]


def test_bench_comm_on_nccl() -> None:
    assert set(on_gpu(every_collective, 2)[0]) == {0}


def refuses_cuda(world: World) -> None:
    with pytest.raises(ValueError, match=r"the shm backend moves CPU tensors, and this one is on cuda:0; use nccl"):
        dist.all_reduce(torch.zeros(1, device="cuda"), group=dist.new_group(backend="shm"))


def test_shm_refuses_cuda_tensors() -> None:
    on_gpu(refuses_cuda, 2)


def train_offloaded(world: World) -> dict[str, list[float]]:
    names = ("bucketed", "zero1", "zero2", "zero3", "fsdp")
    found = {name: train(world, short_gpt(name, "none"), quiet=True).losses for name in names}
    found |= {f"{n} off": train(world, short_gpt(n, "cpu"), quiet=True).losses for n in names[1:]}
    return found | {f"{n} bf16": train(world, short_gpt(n, "none", "bf16"), quiet=True).losses for n in names}


def test_offload_and_bf16_under_sharding() -> None:
    """Where the state lies changes nothing; in bf16 all go the same way."""
    found = on_gpu(train_offloaded, 2)[0]
    for name, losses in found.items():
        tolerance = 0.05 if name.endswith("bf16") else 2e-4
        assert losses == pytest.approx(found["bucketed"], abs=tolerance), name


def test_a_checkpoint_moves_between_layouts_on_a_gpu(tmp_path: Path) -> None:
    def go(name: str, ranks: int, steps: int, resume: bool) -> list[float]:
        config = short_gpt(name, "none")
        config.train.steps, config.train.schedule, config.checkpoint.every = steps, "constant", 3
        source = tmp_path if resume else None
        losses: list[float] = on_gpu(train, ranks, config, tmp_path, True, source)[0].losses
        return losses

    straight = go("bucketed", 2, 9, resume=False)
    shutil.rmtree(tmp_path)
    for name, ranks, steps in (("zero3", 2, 3), ("fsdp", 4, 6), ("zero2", 2, 9)):
        losses = go(name, ranks, steps, resume=steps > 3)
        assert losses == pytest.approx(straight[steps - 3 : steps], abs=2e-4), name


# ---- who is to blame -------------------------------------------------------------------------------------------


def stay_away(world: World) -> None:
    dist.all_reduce(torch.ones(5, device=world.device))
    torch.cuda.synchronize()
    if world.rank == 1:
        time.sleep(300)
    dist.all_reduce(torch.ones(7, device=world.device))
    torch.cuda.synchronize()


def call_something_else(world: World) -> None:
    dist.all_reduce(torch.ones(5, device=world.device))
    if world.rank == 1:
        dist.all_reduce(torch.ones(9, device=world.device))
    else:
        dist.all_gather_into_tensor(torch.ones(18, device=world.device), torch.ones(9, device=world.device))
    torch.cuda.synchronize()
    time.sleep(300)


def save_beside_steps(world: World, folder: Path, name: str) -> tuple[bool, float, float]:
    """(whether the files have the state as it was, how long the host stood still, how long copying takes)."""
    config = short_gpt(name, "none", "bf16")
    config.model = GPT(d_model=1024, layers=8, heads=8, context=64, vocabulary=8192)
    dataset = build_data(config)
    strategy = prepare_strategy(world, config, dataset)
    batch = read_share(dataset.train, torch.arange(8), strategy.batch_share())
    checkpoints = Checkpoints(world, folder / name)
    stops = []
    for number in (1, 2):  # the second one has its pinned memory
        strategy.step(batch)
        strategy.settle()
        before = {n: h.tensor.clone() for n, h in strategy.held().items()}
        checkpoints.wait()  # the files of the save before
        torch.cuda.synchronize()
        start = time.perf_counter()
        checkpoints.save(strategy, {"step": number})
        stops.append(time.perf_counter() - start)
        for _ in range(3):  # they overwrite weights and moments as soon as they may
            strategy.step(batch)
    checkpoints.wait()
    assert checkpoints.failed is None, checkpoints.failed
    strategy.settle()
    strategy.model.zero_grad()
    found, _ = checkpoints.find()
    assert found is not None
    checkpoints.load(found, strategy)
    same = all(torch.equal(h.tensor, before[n]) for n, h in strategy.held().items())
    start = time.perf_counter()
    for held in strategy.held().values():
        held.tensor.to("cpu", copy=True)
    return same, stops[-1], 3 * (time.perf_counter() - start)  # and two moments


@pytest.mark.parametrize("name", ["bucketed", "zero1", "zero3", "fsdp"])
def test_a_save_in_the_background_has_the_state_as_it_was(tmp_path: Path, name: str) -> None:
    for same, stop, copying in on_gpu(save_beside_steps, 2, tmp_path, name):
        assert same
        print(f"{name}: the host stood still for {1e3 * stop:.1f} ms; copying takes {1e3 * copying:.1f} ms")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (stay_away, r"the ranks hung: rank 1 did not reach all_reduce of 7 float32 \(call \d+, world: ranks 0, 1\); "
                    r"it is at test_gpu.py:\d+ stay_away"),
        (call_something_else, r"the ranks hung: rank [01] called all_.*, and rank [01] all_.*as call \d+ of world"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_meet_on_nccl(function: Any, expected: str) -> None:
    start = time.monotonic()
    launch = Launch(nproc=2, device="cuda", share_gpu=True, timeout=10)
    with pytest.raises(RankError) as raised:
        run_on_ranks(function, launch=launch)
    assert re.search(expected, str(raised.value)), raised.value
    print(f"named in {time.monotonic() - start:.1f} s, of which 10 s are the time-out, and the rest the start")


GPT2 = ["--model.name", "gpt", "--data.name", "synthetic", "--train.optimizer", "adamw", "--train.precision", "bf16"]


def test_a_stopped_rank_is_named_on_nccl(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "train", *GPT2, "--share-gpu", "--nproc", "2", "--timeout", "10",
               "--train.steps", "100000", "--run-dir", str(tmp_path / "run")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while step_in_progress(tmp_path / "run") < 5 and time.monotonic() < deadline:
        time.sleep(0.1)
    status = read_status(tmp_path / "run")
    assert status is not None
    said, hangs = look_at(tmp_path / "run")
    assert not hangs
    assert f"rank 1 (process {status.ranks[1][1]} on " in said
    os.kill(status.ranks[1][1], signal.SIGSTOP)
    stopped = time.monotonic()
    output, _ = process.communicate(timeout=90)
    print(output)
    print(f"ended {time.monotonic() - stopped:.1f} s after the stop, with a time-out of 10 s")
    assert process.returncode == 1
    assert f"error: the ranks hung: rank 1 did not answer: process {status.ranks[1][1]} on " in output
    assert "is stopped (SIGSTOP" in output
    assert "Traceback" not in output


def test_out_of_memory_on_a_gpu_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "train", *GPT2, "--share-gpu", "--nproc", "2", "--model.size", "xl",
               "--model.context", "1024", "--model.vocabulary", "50304", "--train.batch-size", "512", "--data.samples",
               "512", "--run-dir", str(tmp_path / "run"), "--parallel.data", "ddp"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    print(done.stderr)
    assert done.returncode == 2
    assert re.search(r"error: rank [01] ran out of memory on NVIDIA .*: it held parameters \d", done.stderr)
    assert "by the planner's formulas a rank holds" in done.stderr
    assert "Traceback" not in done.stderr
