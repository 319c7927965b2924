"""Which rank holds the others up, which one's memory lies, and which one has run out of it."""

import json
import multiprocessing
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import CNN, Config, Data, Parallel, Train
from lockstep.layout import Degrees, Layout
from lockstep.layout.world import World
from lockstep.models.cnn import CNN as MODEL
from lockstep.strategies.replicas import checksum, differing_replicas
from lockstep.training.loop import train
from lockstep.training.pace import OWN_WORK, STEPS, Pace, straggler
from lockstep.training.prepare import load_data, prepare_strategy
from tests.ranks import LONG, on_ranks

# ---- stragglers ------------------------------------------------------------------------------------------------


def times(ranks: int, slow: int | None = None, phase: int = 2, factor: float = 3.0) -> torch.Tensor:
    torch.manual_seed(0)
    found = torch.rand(ranks, STEPS, len(OWN_WORK), dtype=torch.float64) * 1e-3 + 4e-3
    if slow is not None:
        found[slow, :, phase] *= factor
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("phase", range(len(OWN_WORK)))
def test_the_slow_rank_and_what_it_is_slow_in(ranks: int, phase: int) -> None:
    found = straggler(times(ranks, ranks - 1, phase, 6.0), list(range(ranks)), 1.5)
    assert found is not None
    rank, what, factor = found
    assert (rank, f"{what}_ms") == (ranks - 1, OWN_WORK[phase])
    assert 1.5 < factor < 6


@given(st.integers(2, 8), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_noise_that_hits_now_this_rank_and_now_that_one_is_nobodys_fault(ranks: int, seed: int) -> None:
    """Each step one rank, drawn at random, takes three times as long."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.full((ranks, STEPS, len(OWN_WORK)), 5e-3, dtype=torch.float64)
    hit = torch.randint(ranks, (STEPS,), generator=generator)
    for step, rank in enumerate(hit.tolist()):
        found[rank, step] *= 3
    often = int(torch.bincount(hit).max())
    assert often >= 8 or straggler(found, list(range(ranks)), 1.5) is None


def test_less_than_a_millisecond_is_nobodys_concern() -> None:
    assert straggler(times(2, 1) / 1000, [0, 1], 1.5) is None


@pytest.mark.parametrize(("ranks_on_device", "warned"), [(1, [0, 1, 0, 0, 0]), (2, [0, 0, 1, 0, 0])])
def test_a_rank_is_named_when_it_is_slow_for_longer_than_a_moment(
    ranks_on_device: int, warned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow, slow, slow, as its peers, slow."""
    pace = Pace(Layout(World(ranks_on_device=ranks_on_device), Degrees()), 1.5)
    monkeypatch.setattr(pace, "layout", SimpleNamespace(norm=SimpleNamespace(size=2)))  # as if there were another
    pace.peers = [[0, 1]]
    seen = []
    for factor in (6.0, 6.0, 6.0, 1.0, 6.0):
        monkeypatch.setattr("lockstep.training.pace.all_gather", lambda *_, f=factor, **__: times(2, 1, 2, f))
        lines = [line for _ in range(STEPS) for line in pace.add(dict.fromkeys(OWN_WORK, 10.0))]
        seen.append(len(lines))
    assert seen == warned


def slow_on_rank_1(world: World, folder: str) -> None:
    config = Config(CNN(), Data(name="digits"), Train(batch_size=64, steps=30, evaluate_every=0, log_every=10))
    if world.rank == 1:
        whole = MODEL.forward

        def slow(self: Any, inputs: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1)
            return whole(self, inputs)

        MODEL.forward = slow  # type: ignore[method-assign]
    train(world, config, Path(folder), quiet=True)


def test_a_slow_rank_is_named_in_the_metrics(tmp_path: Path) -> None:
    on_ranks(slow_on_rank_1, 2, str(tmp_path))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if record["kind"] == "straggler"]
    assert found
    assert {record["step"] for record in found} <= {20, 30}  # a busy machine may make another rank slow for once
    assert {(record["rank"], record["phase"]) for record in found} == {(1, "forward")}


def busy() -> None:
    while True:
        pass


@pytest.mark.slow
def test_a_healthy_run_on_a_busy_machine_names_nobody(tmp_path: Path) -> None:
    """70 steps of two ranks, beside three processes that take what they get."""
    load = [multiprocessing.get_context("spawn").Process(target=busy, daemon=True) for _ in range(3)]
    for process in load:
        process.start()
    try:
        command = [sys.executable, "-m", "lockstep", "train", "configs/digits_cnn.yaml", "--nproc", "2",
                   "--train.steps", "70", "--train.evaluate-every", "0", "--run-dir", str(tmp_path)]  # fmt: skip
        subprocess.run(command, check=True, timeout=LONG, capture_output=True)
    finally:
        for process in load:
            process.kill()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record for record in records if record["kind"] == "straggler"] == []


# ---- replicas --------------------------------------------------------------------------------------------------


def flip_a_bit(world: World, data: str) -> list[str | None]:
    """What is said before, and after one bit of one rank's copy has changed."""
    config = Config(CNN(channels=(4, 8), hidden=16), Data(name="digits"), Train(batch_size=12), Parallel(data=data))
    strategy = prepare_strategy(world, config, load_data(world, config))
    found = [differing_replicas(strategy)]
    name, held = next(iter(strategy.held().items()))
    if world.rank == 2:
        bits = held.tensor.view(-1).view(torch.int32)
        bits[0] ^= 1
    return [*found, differing_replicas(strategy), name]


@pytest.mark.parametrize(
    "data", ["bucketed", "zero3", *(pytest.param(d, marks=pytest.mark.slow) for d in ("ddp", "zero1"))]
)
def test_a_flipped_bit_is_found(data: str) -> None:
    for before, after, name in on_ranks(flip_a_bit, 3, data):
        assert before is None
        if data == "zero3":  # every element is held once: nobody has another copy
            assert after is None
        else:
            assert after == f"rank 2 of 3 that hold it: {name}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_checksum_sees_the_highest_bits_and_signs_that_have_changed_places(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 9).to(dtype)
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    sums = {checksum(tensor)}
    for index, bit in product(range(8), range(8 * dtype.itemsize - 1)):
        bits[index] ^= 1 << bit
        sums.add(checksum(tensor))
        bits[index] ^= 1 << bit
    assert len(sums) == 1 + 8 * (8 * dtype.itemsize - 1)
    signs = torch.tensor([1, 2, -1, 3], dtype=dtype)
    assert checksum(signs) != checksum(signs[[2, 1, 0, 3]])


@given(st.integers(1, 300), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.data())
@settings(max_examples=40, deadline=None)
def test_the_checksum_sees_every_bit_and_every_place(length: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    other = tensor.clone()
    index = data.draw(st.integers(0, length - 1))
    bits = other.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[index] ^= 1 << data.draw(st.integers(0, 8 * dtype.itemsize - 2))
    assert checksum(tensor) != checksum(other)
    swapped = tensor.flip(0)
    assert torch.equal(swapped, tensor) or checksum(swapped) != checksum(tensor)


# ---- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_out_of_memory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
        "    def forward(self, x):\n"
        "        if x.device.type != 'meta' and torch.distributed.is_initialized():\n"
        "            torch.empty(1 << 60, dtype=torch.uint8)\n"
        "        return super().forward(x)\n"
    )
    command = [sys.executable, "-m", "lockstep", "train", "--model.import", "hungry:Net", "--nproc", "2", "--run-dir",
               "run", "--max-restarts", "2"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    line, by_the_planner = done.stderr.splitlines()[-2:]
    assert by_the_planner.startswith("by the planner's formulas a rank holds 0.00 GiB at its peak; with --train.accum")
    assert "ran out of memory on this machine: it held parameters 0.00 GiB" in line
    assert "--train.accumulation 2, half the micro-batch" in line
    assert "--parallel.data zero1" in line
    assert "Traceback" not in done.stderr
    assert "started anew" not in done.stderr
