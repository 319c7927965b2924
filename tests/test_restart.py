"""Ranks that fail are started anew and go on: with the weights, and the metrics, of a run that nothing disturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from lockstep.config import Checkpoint
from lockstep.errors import RankError, UserError
from lockstep.inference.export import load_model
from lockstep.launch import restart
from lockstep.launch.leftovers import MEMORY
from lockstep.results.metrics import METRICS
from lockstep.training.attempt import read_status, step_in_progress
from lockstep.training.metrics import SET_ASIDE, set_aside
from lockstep.training.saving import Best, Saving
from tests.ranks import LONG

pytestmark = pytest.mark.alone

CONFIG = "configs/digits_cnn.yaml"
SHORT = ("--train.steps", "60", "--train.log-every", "2", "--train.evaluate-every", "0")


def start(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lockstep", "train", CONFIG, *SHORT, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def reached(run: Path, step: int) -> list[int]:
    """Wait until the run takes this step; the processes of its ranks."""
    deadline = time.monotonic() + LONG
    while step_in_progress(run) < step:
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.005)
    status = read_status(run)
    assert status is not None
    return [pid for _, pid in status.ranks]


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / METRICS).read_text().splitlines()]


def weights(run: Path) -> dict[str, Any]:
    """Of the run's last checkpoint."""
    return load_model(run)[0].state_dict()


def same_weights(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(bool((mine[name] == theirs[name]).all()) for name in mine)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    process = start("--nproc", "2", "--checkpoint.every", "60", "--run-dir", str(run))
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 0, output
    return run


@pytest.mark.parametrize(
    ("saving", "lost_at_most"),
    [
        pytest.param(("--checkpoint.every", "10"), 20, id="disk", marks=pytest.mark.slow),
        pytest.param(("--checkpoint.in-memory", "4"), 10, id="memory", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_costs_some_steps_and_no_weight(
    undisturbed: Path, tmp_path: Path, saving: tuple[str, ...], lost_at_most: int
) -> None:
    """Bit-equal to the end; every step stands in the metrics once, and what was lost in a file of its own."""
    run = tmp_path / "run"
    with start("--nproc", "2", "--run-dir", str(run), *saving, "--checkpoint.every-seconds", "600",
               "--max-restarts", "2") as process:  # fmt: skip
        os.kill(reached(run, 25)[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 0, output
    assert "rank 1 failed first (exit code -9): it was ended by SIGKILL; all ranks are started anew (1 of 2)" in output
    assert "resumed at step" in output
    found = records(run)
    steps = Counter((record["kind"], record["step"]) for record in found)
    assert max(steps.values()) == 1
    assert [r["step"] for r in found if r["kind"] == "train"] == list(range(2, 61, 2))
    (restarted,) = [record for record in found if record["kind"] == "restart"]
    assert restarted["restarts"] == 1
    assert 0 <= restarted["lost"] <= lost_at_most
    assert same_weights(undisturbed, run)
    assert not list(Path("/dev/shm").glob(f"lockstep-*-{process.pid}-*"))


@pytest.mark.slow
def test_a_step_that_fails_twice_is_not_tried_a_third_time(tmp_path: Path) -> None:
    """The first error is what one sees at the end."""
    (tmp_path / "broken.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    calls = 0\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
        "    def forward(self, x):\n"
        "        Net.calls += self.training and x.device.type != 'meta'\n"
        "        if Net.calls > 3:\n"
        "            raise RuntimeError('a bit has flipped')\n"
        "        return super().forward(x)\n"
    )
    command = [sys.executable, "-m", "lockstep", "train", "--model.import", "broken:Net", "--nproc", "2", "--run-dir",
               "run", "--max-restarts", "5", "--train.steps", "9"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("all ranks are started anew") == 2, done.stderr
    assert "two attempts in a row ended in step" in done.stderr
    assert "after 2 failures; the first: rank" in done.stderr
    assert "a bit has flipped" in done.stderr


# ---- without ranks -------------------------------------------------------------------------------------------


def test_the_first_error_is_told_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [RankError("rank 1 failed: one"), RankError("rank 0 failed: two"), RankError("rank 0 failed: three")]
    left = list(errors)

    def attempt() -> list[Any]:
        assert restart.restart_count() == len(errors) - len(left)
        assert os.environ[MEMORY]
        raise left.pop(0)

    with pytest.raises(RankError, match=r"(?s)max-restarts 2.*3 failures; the first: .*one\nthe last failure: .*three"):
        restart.with_restarts(attempt, 2)
    assert capsys.readouterr().err.count("started anew") == 2
    assert restart.restart_count() == 0


def test_a_users_mistake_is_not_repeated() -> None:
    calls = []

    def attempt() -> list[Any]:
        calls.append(1)
        raise UserError("no such file")

    with pytest.raises(UserError, match="no such file"):
        restart.with_restarts(attempt, 3)
    assert len(calls) == 1


def test_records_of_steps_that_are_taken_again_are_set_aside(tmp_path: Path) -> None:
    lines = [json.dumps({"kind": "train", "step": step}) + "\n" for step in (10, 20, 30)]
    (tmp_path / METRICS).write_text("".join(lines) + '{"kind": "tr')  # killed while it wrote
    assert set_aside(tmp_path, 20)
    assert (tmp_path / METRICS).read_text() == "".join(lines[:2])
    assert (tmp_path / SET_ASIDE).read_text() == lines[2] + '{"kind": "tr\n'
    assert not set_aside(tmp_path, 20)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"launch": 1}', "null", '{"ranks": 7}'])
def test_a_status_that_is_none_is_no_status(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None


class Place:
    """Keeps the steps that it is asked to save."""

    problem: str | None = None

    def __init__(self, name: str, saved: list[tuple[str, int]]) -> None:
        self.name, self.saved = name, saved

    def save(self, _: Any, run: dict[str, Any], wait: bool, best: int | None) -> None:
        self.saved.append((self.name, run["step"]))

    failed = None

    def wait(self) -> None:
        """Everything is saved at once."""


def test_memory_has_a_copy_of_what_the_disk_is_still_writing() -> None:
    """Else a rank that is lost meanwhile would cost the steps since the copy before."""
    saved: list[tuple[str, int]] = []
    saving: Any = Saving.__new__(Saving)
    saving.asked, saving.strategy, saving.logger, saving.course = (
        Checkpoint(every=4, in_memory=2),
        None,
        MagicMock(),
        {},
    )
    saving.best, saving.due, saving.saved_at = Best(), False, -1
    saving.disk, saving.memory = Place("disk", saved), Place("memory", saved)
    for step in range(1, 9):
        saving.after_step(step)
    assert saved == [("memory", 2), ("memory", 4), ("disk", 4), ("memory", 6), ("memory", 8), ("disk", 8)]
    saving.disk.problem = "step 8 was not saved"
    saving.save(9, wait=True)  # would overwrite it
    saving.logger.warn.assert_called_once_with("step 8 was not saved; training goes on")
