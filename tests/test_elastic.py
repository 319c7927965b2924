"""torchrun's own restarts: with fewer ranks when a node is lost, and the batch stays what it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.training.attempt import step_in_progress
from tests.ranks import LONG, free_port

AGENT = (
    *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1"),
    *("--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-conf"),
    "last_call_timeout=2,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3",
)


def agent(port: int, run: Path) -> "subprocess.Popen[str]":
    train = ("train", "configs/digits_cnn.yaml", "--train.steps", "300", "--train.batch-per-rank", "64",
             "--train.evaluate-every", "0", "--train.log-every", "20", "--checkpoint.every", "20", "--run-dir",
             str(run), "--timeout", "20")  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", *AGENT, "--rdzv-endpoint", f"127.0.0.1:{port}",
               "-m", "lockstep", *train]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_a_lost_node_leaves_the_batch_as_it_was(tmp_path: Path) -> None:
    """The agent that is killed takes its rank with it; the other goes on alone, with the same global batch."""
    run = tmp_path / "run"
    port = free_port()
    first = agent(port, run)
    time.sleep(1)  # it hosts the rendezvous
    second = agent(port, run)
    deadline = time.monotonic() + LONG
    while step_in_progress(run) < 45 and time.monotonic() < deadline:
        time.sleep(0.02)
    second.send_signal(signal.SIGKILL)
    output, _ = first.communicate(timeout=LONG)
    second.wait()
    assert first.returncode == 0, output
    assert "global batch 128 = 64 per rank x 2 ranks" in output
    assert "global batch 128 = 128 per rank x 1 rank" in output
    assert "saved by 2 ranks" in output
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (restarted,) = [record for record in records if record["kind"] == "restart"]
    assert restarted["ranks"] == 1
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(20, 301, 20))
