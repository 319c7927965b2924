"""On a real Slurm, where one answers: srun as it is, two steps of one job at once, a job that is warned and goes on.

Skipped elsewhere, with the reason. SLURM_CONF leads to it; its nodes see this checkout and the temporary folder.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.config.shipped import find_config
from lockstep.training.attempt import step_in_progress

BIN = Path(sys.executable).parent
QUICK = ("--train.steps", "6", "--train.evaluate-every", "0", "--device", "cpu")


def why_not() -> str:
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        return "Slurm is not installed here"
    asked = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, timeout=20)
    return "" if asked.returncode == 0 and "idle" in asked.stdout else "no Slurm with idle nodes answers (SLURM_CONF)"


pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.skipif(bool(reason := why_not()), reason=reason)]


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def srun(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["srun", *words], capture_output=True, text=True, timeout=180, env=environment())


def submitted(script: Path, folder: Path) -> str:
    made = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, cwd=folder,
                          env=environment(), timeout=60, check=True)  # fmt: skip
    return made.stdout.strip().partition(";")[0]


def state(job: str) -> str:
    told = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"JobState=(\w+)", told)
    return found[1] if found else "GONE"


def ended(job: str, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while (now := state(job)) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"):
        assert time.monotonic() < deadline, f"job {job} is still {now}"
        time.sleep(0.5)
    return now


@pytest.mark.parametrize("where", [("-n", "2"), ("--nodes=2", "-n", "2")], ids=["one node", "two nodes"])
def test_each_task_is_a_rank(where: tuple[str, ...], tmp_path: Path) -> None:
    done = srun(*where, "lockstep", "train", "configs/digits_cnn.yaml", "--run-dir", str(tmp_path / "run"), *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on cpu" in done.stdout


def test_two_steps_of_one_job_at_once(tmp_path: Path) -> None:
    config = find_config("digits_cnn")
    lines = [f"srun -n 2 --overlap lockstep train {config} --run-dir {name} {' '.join(QUICK)} & p{name}=$!"
             for name in ("a", "b")]  # fmt: skip
    script = tmp_path / "job.sh"
    script.write_text("\n".join(["#!/usr/bin/env bash", "#SBATCH -n 2", "#SBATCH -o out.log", *lines,
                                 "wait $pa && wait $pb", ""]))  # fmt: skip
    assert ended(submitted(script, tmp_path), 180) == "COMPLETED", (tmp_path / "out.log").read_text()
    assert (tmp_path / "out.log").read_text().count("6 steps in") == 2


def test_a_name_that_nobody_knows_is_said_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    done = subprocess.run(
        ["srun", "-n", "2", "lockstep", "train", "configs/digits_cnn.yaml", "--run-dir", str(tmp_path / "run"), *QUICK],
        capture_output=True, text=True, timeout=180, env={**environment(), "MASTER_ADDR": "no-such-node.invalid"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "MASTER_ADDR is no-such-node.invalid, which" in done.stderr
    assert time.monotonic() - start < 100


def test_a_warned_job_saves_and_is_queued_again(tmp_path: Path) -> None:
    """What `lockstep launch slurm` writes: USR1 as before a time limit; the job goes on where it had saved."""
    config = find_config("digits_cnn")
    script, run = tmp_path / "job.sh", tmp_path / "runs" / "warned"
    write = [sys.executable, "-m", "lockstep", "launch", "slurm", str(config), "--ranks", "2", "--name", "warned",
             "--time", "00:10:00", "--out", str(script)]  # fmt: skip
    subprocess.run(write, check=True, capture_output=True, timeout=60)
    text = script.read_text()
    assert "lockstep train" in text
    script.write_text(text.replace("--resume auto", "--resume auto --train.steps 1500 --device cpu"))
    job = submitted(script, tmp_path)
    deadline = time.monotonic() + 90
    while step_in_progress(run) < 50:
        assert time.monotonic() < deadline, state(job)
        time.sleep(0.05)
    subprocess.run(["scancel", "--signal=USR1", job], check=True, timeout=60)
    assert ended(job, 280) == "COMPLETED"
    log = (tmp_path / f"warned-{job}.log").read_text()
    assert "stopped by SIGUSR1 and saved" in log
    assert "resumed at step" in log
    assert "up to 1500" in log
