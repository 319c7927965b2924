"""torchrun's own restarts: fewer ranks when a node is lost, more when one comes back, always the same batch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.chaos.nodes import environment
from lockstep.training.attempt import read_status, step_in_progress
from tests.ranks import LONG, free_port

pytestmark = pytest.mark.alone

AGENT = (
    *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1"),
    *("--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-conf"),
    "last_call_timeout=2,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3",
)

STEPS = 1200


def agent(port: int, run: Path) -> "subprocess.Popen[str]":
    train = ("train", "configs/digits_cnn.yaml", "--train.steps", str(STEPS), "--train.batch-per-rank", "64",
             "--train.evaluate-every", "0", "--train.log-every", "20", "--checkpoint.in-memory", "20", "--run-dir",
             str(run), "--timeout", "20")  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", *AGENT, "--rdzv-endpoint", f"127.0.0.1:{port}",
               "-m", "lockstep", *train]  # fmt: skip
    return subprocess.Popen(
        command, env={**os.environ, **environment()}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def until_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + LONG
    while step_in_progress(run) < step:
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def until_ranks(run: Path, ranks: int) -> None:
    deadline = time.monotonic() + LONG
    while (status := read_status(run)) is None or len(status.ranks) != ranks:
        assert time.monotonic() < deadline, f"there never were {ranks} ranks"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.long
def test_a_lost_node_leaves_the_batch_as_it_was_and_may_come_back(tmp_path: Path) -> None:
    """The agent that is killed takes its rank with it; the other goes on alone, with the same global batch, from what
    it holds of both in its memory. When a node comes back, torchrun ends the rank by SIGTERM, which saves to the disk,
    and both go on together from there.
    """
    run, port = tmp_path / "run", free_port()
    agents = [agent(port, run)]
    try:
        time.sleep(1)  # it hosts the rendezvous
        agents.append(agent(port, run))
        until_step(run, 45)
        agents[1].send_signal(signal.SIGKILL)
        until_ranks(run, 1)
        until_step(run, 60)
        agents.append(agent(port, run))
        until_ranks(run, 2)
        outputs = [one.communicate(timeout=LONG)[0] for one in (agents[0], agents[2])]
    finally:
        for one in agents:
            one.kill()
            one.wait()
    assert [agents[0].returncode, agents[2].returncode] == [0, 0], outputs
    assert "global batch 128 = 64 per rank x 2 ranks" in outputs[0]
    assert "global batch 128 = 128 per rank x 1 rank" in outputs[0]
    assert "saved by 2 ranks" in outputs[0]
    assert "saved by 1 rank" in outputs[0], outputs[0]
    resumed = [line for line in outputs[0].splitlines() if "resumed at step" in line]
    assert len(resumed) == 2
    assert "/dev/shm/lockstep-" in resumed[0]
    assert str(run / "checkpoints") in resumed[1]
    assert not [f for one in agents for f in Path("/dev/shm").glob(f"lockstep-*-{one.pid}-*") if one is not agents[1]]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["ranks"] for record in records if record["kind"] == "restart"] == [1, 2]
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(20, STEPS + 1, 20))
