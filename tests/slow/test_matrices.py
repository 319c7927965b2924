"""Everything against everything: verify at 2, 4 and 8 ranks, every layout to every layout, savers, presets."""

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.bench.presets import PRESETS
from lockstep.layout.world import World
from lockstep.strategies import available_strategies
from lockstep.verify import Request, Verdict, verify
from tests.ranks import on_ranks
from tests.test_checkpoint import session

pytestmark = pytest.mark.slow

EXACT = [name for name in available_strategies() if name != "single"]


def verify_some(world: World, names: list[str], savers: bool) -> list[Verdict]:
    return verify(world, Request(names, steps=4, savers=savers))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_strategy_equals_one_process(ranks: int) -> None:
    names = [n for n in EXACT if not (n.startswith("deepspeed") and ranks == 8)]  # minutes, on two cores
    failed = {
        v.strategy: v.failures for v in on_ranks(verify_some, ranks, names, False, timeout=500)[0] if not v.passed
    }
    assert not failed


def test_every_strategy_with_every_saver() -> None:
    names = [n for n in EXACT if "topk" not in n and "powersgd" not in n and "16" not in n]
    failed = {v.strategy: v.failures for v in on_ranks(verify_some, 2, names, True, timeout=500)[0] if not v.passed}
    assert not failed


def test_every_layout_loads_from_every_other(tmp_path: Path) -> None:
    """At 2 ranks all pairs; and each from one process and from 3 ranks, and back to one process."""
    names = [
        "bucketed",
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "fsdp",
        "zero1_torch",
        "zero3+SHARD_GRAD_OP",
        "fsdp+NO_SHARD",
    ]
    saved: dict[tuple[str, str], Any] = {}
    wrong: list[str] = []
    rounds: list[tuple[int, list[tuple[str, str, str]], list[str]]] = [
        (1, [], ["single"]),
        (3, [("1", "single", name) for name in names], names),
        (2, [("3", name, name) for name in names], names),
        (2, [("2", a, b) for a, b in product(names, names)], []),
        (1, [("2", name, "single") for name in names] + [("3", name, "single") for name in names], []),
    ]
    for ranks, loads, saves in rounds:
        found = on_ranks(session, ranks, loads, saves, tmp_path, timeout=800)[0]
        saved |= {(str(ranks), name): found[name] for name in saves}
        for source, saver, loader in loads:
            (weights, losses), (then, later) = found[source, saver, loader], saved[source, saver]
            same = all(torch.equal(weights[name], tensor) for name, tensor in then.items())
            if not same or losses != pytest.approx(later, abs=1e-12):
                wrong.append(f"{saver} of {source} ranks -> {loader} of {ranks}: {'losses' if same else 'weights'}")
    assert not wrong


SMALL_GPT = ["--model.d-model", "64", "--model.layers", "2", "--model.heads", "4"]
QUICK = {
    **dict.fromkeys(("overlap", "accumulation", "zero-stages", "hooks-vs-manual", "compression", "buckets"), SMALL_GPT),
    "cnn-sizes": ["--train.batch-size", "4"],
    "naive-ddp": ["--model.size", "custom", "--model.d-model", "32", "--model.layers", "2"],
    "ddp-vs-fsdp": ["--model.width", "8", "--train.batch-size", "16"],
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs(preset: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "bench", "train", "--preset", preset, "--nproc", "2", "--steps", "2"]
    command += ["--warmup", "0", "--no-baseline", "--csv", str(tmp_path / "out.csv"), *QUICK.get(preset, [])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "out.csv").read_text().count("\n") > 2
