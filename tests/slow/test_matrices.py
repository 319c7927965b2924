"""A covering set of pairs: `lockstep verify` itself, odd ranks, savers, layouts to layouts; and every preset."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.bench.presets import PRESETS
from lockstep.cli import main
from lockstep.layout.world import World
from lockstep.strategies import STRATEGIES, available_strategies
from lockstep.verify import Request, Verdict, preset, verify
from tests.ranks import on_ranks
from tests.test_checkpoint import check_moves

pytestmark = pytest.mark.slow

BY_HAND = [name for name in available_strategies() if STRATEGIES[name.partition("+")[0]].package is None]
EXACT = [name for name in available_strategies() if name != "single"]
LAYOUTS = ["bucketed", "ddp", "zero1", "zero2", "zero3", "fsdp", "zero1_torch", "zero3+SHARD_GRAD_OP", "fsdp+NO_SHARD"]
LAYOUTS += [name for name in ("deepspeed",) if name in available_strategies()]


@pytest.mark.proof
def test_lockstep_verify_passes(tmp_path: Path) -> None:
    """As a user calls it: every data strategy and axis at 2 ranks, pairs at 4, three axes at 8, and every law."""
    command = [sys.executable, "-m", "lockstep", "verify"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=890, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) of (\d+) passed", done.stdout)
    assert passed is not None
    assert passed[1] == passed[2]
    assert int(passed[1]) == sum(map(len, preset("standard").values()))


def verify_some(world: World, names: list[str], savers: bool) -> list[Verdict]:
    return verify(world, Request(names, steps=3, savers=savers, only_values=True))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("ranks", "names"), [(3, BY_HAND[1:]), (8, ["overlap", "zero1", "zero3", "fsdp", "bucketed+topk"])]
)
def test_odd_and_larger_numbers_of_ranks(ranks: int, names: list[str]) -> None:
    verdicts = on_ranks(verify_some, ranks, names, False, timeout=800)[0]
    assert not {v.strategy: v.failures for v in verdicts if not v.passed}


@pytest.mark.proof
def test_every_strategy_with_every_saver() -> None:
    compressed = ("topk", "powersgd", "16", "int8", "1bit")
    names = [n for n in EXACT if not any(word in n for word in compressed)]
    failed = {v.strategy: v.failures for v in on_ranks(verify_some, 2, names, True, timeout=800)[0] if not v.passed}
    assert not failed


@pytest.mark.proof
def test_every_layout_loads_from_others(tmp_path: Path) -> None:
    """Each is loaded at other ranks by itself or by another, from one process or back to it."""
    names = LAYOUTS
    following = [("2", a, names[(i + step) % len(names)]) for i, a in enumerate(names) for step in (1 + i % 4,)]
    rounds: list[tuple[int, list[tuple[str, str, str]], list[str]]] = [
        (1, [], ["single"]),
        (3, [("1", "single", name) for name in names[::3]], names[1::2]),
        (2, [("3", name, name) for name in names[1::2]], names),
        (2, following[::2], []),
        (1, [("2", name, "single") for name in names[::4]] + [("3", name, "single") for name in names[1::4]], []),
    ]
    check_moves(rounds, tmp_path, 800)


SMALL_GPT = ["--model.d-model", "64", "--model.layers", "2", "--model.heads", "4"]
QUICK = {
    **dict.fromkeys(("overlap", "accumulation", "zero-stages", "hooks-vs-manual", "compression", "buckets"), SMALL_GPT),
    "cnn-sizes": ["--train.batch-size", "4"],
    "naive-ddp": ["--model.size", "custom", "--model.d-model", "32", "--model.layers", "2"],
    "ddp-vs-fsdp": ["--model.width", "8", "--train.batch-size", "16"],
}


ELSEWHERE = ("hooks-vs-manual", "low-communication")
"""tests/test_bench_train.py, tests/test_low_communication.py"""


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ELSEWHERE])
def test_every_preset_runs(preset: str, tmp_path: Path) -> None:
    command = ["bench", "train", "--preset", preset, "--nproc", "2", "--steps", "2", "--warmup", "0", "--no-baseline"]
    assert main([*command, "--csv", str(tmp_path / "out.csv"), *QUICK.get(preset, [])]) == 0
    assert (tmp_path / "out.csv").read_text().count("\n") > 2
