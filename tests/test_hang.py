"""Ranks that hang: who is to blame, what everybody was doing, and that all of them end."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.doctor.running import look_at
from lockstep.errors import RankError, UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.launch.calls import Call, last_of_each
from lockstep.launch.processes import process_namespace
from lockstep.launch.situation import Situation, report, verdict
from lockstep.launch.watch import Watch, key
from lockstep.layout.world import World
from lockstep.training.attempt import Status, read_status, step_in_progress
from tests.ranks import LONG

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped and looked at as Linux does")

WORLD = (0, 1, 2)


def waits(number: int, what: str, over: bool = False, ranks: tuple[int, ...] = WORLD, group: str = "world") -> Call:
    return Call(group, ranks, number, what, over)


def at(rank: int, *calls: Call, stack: str = "loop.py:1 train") -> Situation:
    return Situation(rank, "here", 100 + rank, list(calls), [stack])


ONE, OTHER = "all_reduce of 1,024 float32", "reduce_scatter of 2,048 float32"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(
            [at(0, waits(7, ONE)), at(1, waits(6, ONE, over=True), stack="data.py:9 read"), at(2, waits(7, ONE))],
            "rank 1 did not reach all_reduce of 1,024 float32 (call 7, world: ranks 0, 1, 2); it is at data.py:9 read",
            id="one is behind",
        ),
        pytest.param(
            [at(0, waits(7, ONE)), at(1, waits(7, ONE)), at(2, waits(7, OTHER))],
            "rank 2 called reduce_scatter of 2,048 float32, and ranks 0, 1 all_reduce of 1,024 float32, as call 7 of "
            "world: ranks must make the same calls in the same order",
            id="one calls something else",
        ),
        pytest.param(
            [
                at(0, waits(7, ONE, ranks=(0, 1), group="tp"), waits(3, ONE, over=True)),
                at(1, waits(6, ONE, over=True, ranks=(0, 1), group="tp"), waits(4, OTHER)),
                at(2, waits(4, OTHER)),
            ],
            "rank 0 did not reach reduce_scatter of 2,048 float32 (call 4, world: ranks 0, 1, 2); it waits in "
            "all_reduce of 1,024 float32 (call 7, tp: ranks 0, 1)",
            id="they wait in different groups",
        ),
        pytest.param(
            [at(0, Call("pp", (0, 1), 0, "receive from rank 1", False, 1)), at(1, stack="mine.py:3 forward"), at(2)],
            "rank 1 did not reach what rank 0 waits for: receive from rank 1 (pp: ranks 0, 1); it is at "
            "mine.py:3 forward",
            id="a message that nobody sends",
        ),
        pytest.param(
            [at(rank, waits(7, ONE)) for rank in WORLD],
            "ranks 0, 1, 2 wait though every rank came: what they send does not arrive, or they wait for each other in "
            "a circle (lockstep doctor tries the connections)",
            id="nobody is behind",
        ),
        pytest.param(
            [at(rank, waits(7, ONE, over=True)) for rank in WORLD], "no rank waits for another one now", id="ok"
        ),
    ],
)
def test_who_is_to_blame(found: list[Situation], expected: str) -> None:
    by_rank = {situation.rank: Situation.from_json(situation.to_json()) for situation in found}
    assert verdict(by_rank, {}) == expected
    lines = report(by_rank, {}).splitlines()
    assert lines[0] == expected
    assert [line for line in lines if line.startswith("  rank")][1].startswith("  rank 1 (process 101 on here): ")


def test_a_silent_rank_is_named_first() -> None:
    line = verdict({0: at(0, waits(7, ONE))}, {1: "process 5 on here is stopped"})
    assert line.startswith("rank 1 did not answer: process 5 on here is stopped; rank 0 waits in all_reduce")


def finishes_early(world: World) -> None:
    if world.rank == 0:
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_has_finished_is_named_so(backend: str) -> None:
    """It does not answer any more, and nothing is wrong with its process."""
    launch = Launch(nproc=2, device="cpu", backend=backend, timeout=3)
    with pytest.raises(RankError) as failure:
        run_on_ranks(finishes_early, launch=launch, start_method="forkserver")
    assert "rank 1 has finished; rank 0 waits in all_reduce of 3 float32" in str(failure.value)
    assert "did not answer" not in str(failure.value)


STARTS = """
import os, signal, subprocess, sys, time
if "LOCAL_RANK" not in os.environ:  # the launcher
    command = [sys.executable, sys.argv[0]]
    ranks = [subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(n)}) for n in range(3)]
    ranks[1].send_signal(signal.SIGSTOP)
    sys.exit(ranks[0].wait() or ranks[2].kill() or -ranks[1].wait())
if os.environ["LOCAL_RANK"] != "0":
    time.sleep(600)
from lockstep.launch.join import stopped_ranks
print(*stopped_ranks(3))
"""


def test_a_rank_that_is_stopped_before_it_joins_is_named(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "starts.py")],
        env={**os.environ, "LOCAL_WORLD_SIZE": "3"},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert re.fullmatch(r"rank 4: process \d+ on \S+ is stopped \(SIGSTOP; kill -CONT lets it go on\)\n", done.stdout)
    assert done.returncode == signal.SIGKILL, "it was ended, so that the launcher does not wait for it"


def entry(name: str, number: int, sizes: list[int], state: str = "started", **more: Any) -> dict[str, Any]:
    """As torch's flight recorders write it."""
    return {"process_group": ["0", "default_pg"], "profiling_name": name, "collective_seq_id": number, "state": state,
            "input_sizes": [sizes], "input_dtypes": ["Float"], "retired": False} | more  # fmt: skip


def test_what_the_flight_recorder_of_nccl_says() -> None:
    """Collectives are counted by themselves; a message is no collective that others should have called too."""
    entries = [
        entry("nccl:_all_gather_base", 1, [5], "completed"),
        entry("nccl:all_reduce", 2, [7, 3]),
        entry("nccl:send 0->1", 2, [4], "completed", is_p2p=True),
        entry("nccl:recv 0<-1", 2, [4], is_p2p=True),
    ]
    collective, message = last_of_each(entries, {"0": (2, 5)})
    assert collective == Call("world", (2, 5), 2, "all_reduce of 21 float32", False)
    assert message == Call("world", (2, 5), 0, "recv from rank 5 of 4 float32", False, 5)
    assert last_of_each(entries[:3], {"0": (2, 5)})[1].over
    again = last_of_each([entry("nccl:recv 0<-1", 2, [4], is_p2p=True, record_id=9)], {"0": (2, 5)})[0]
    assert again == message
    assert key(again) != key(message)  # the next of its kind: what waits is not always the same one
    assert last_of_each(entries[:1], {})[0].what == "all_gather_into_tensor of 5 float32"


# ---- real ranks ------------------------------------------------------------------------------------------------


def stay_away(world: World) -> None:
    dist.all_reduce(torch.ones(5))
    if world.rank == 1:
        time.sleep(LONG)
    dist.all_reduce(torch.ones(7))


def call_something_else(world: World) -> None:
    dist.all_reduce(torch.ones(5))
    if world.rank == 2:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(7))
    time.sleep(LONG)


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (stay_away, r"the ranks hung: rank 1 did not reach all_reduce of 7 float32 \(call \d+, world: ranks 0, 1, 2"
                    r"\); it is at test_hang.py:\d+ stay_away"),
        (call_something_else, r"disagree: (rank 2 calls|.*and rank 2) barrier|"
                              r"the ranks hung: rank 2 (called|did not come)"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_meet(function: "object", expected: str, backend: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as raised:
        run_on_ranks(function, launch=Launch(3, "cpu", backend, timeout=5.0), start_method="forkserver")  # type: ignore[arg-type]
    assert re.search(expected, str(raised.value)), raised.value
    assert time.monotonic() - start < LONG / 2  # not the sleep's end; how soon, the fault suite measures


def started(run: Path, *flags: str) -> "tuple[subprocess.Popen[str], list[int]]":
    command = [sys.executable, "-m", "lockstep", "train", "configs/digits_cnn.yaml", "--nproc", "2", "--run-dir",
               str(run), "--train.steps", "100000", *flags]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + LONG
    while step_in_progress(run) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    status = read_status(run)
    assert status is not None
    return process, [pid for _, pid in status.ranks]


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_ended(tmp_path: Path) -> None:
    """First asked while all is well, which changes nothing."""
    process, ranks = started(tmp_path / "run", "--timeout", "8")
    os.kill(ranks[0], signal.SIGQUIT)
    time.sleep(1.5)
    said, hangs = look_at(tmp_path / "run")
    assert not hangs
    assert f"rank 1 (process {ranks[1]} on " in said
    assert process.poll() is None
    os.kill(ranks[1], signal.SIGSTOP)
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 1
    assert f"error: the ranks hung: rank 1 did not answer: process {ranks[1]} on " in output
    assert "is stopped (SIGSTOP; kill -CONT lets it go on); rank 0 waits in all_reduce" in output
    assert output.count("rank 0 (process") == 2  # once when asked, once at the end
    assert "Traceback" not in output
    deadline = time.monotonic() + LONG
    while Path(f"/proc/{ranks[1]}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{ranks[1]}").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no status\.json of a run; give the folder of a run"):
        look_at(tmp_path)


def test_a_run_whose_ranks_are_gone(tmp_path: Path) -> None:
    status = Status("x", "running", 0, [(platform.node(), 4194305)], "127.0.0.1:1")
    (tmp_path / "status.json").write_text(json.dumps(asdict(status)))
    said, hangs = look_at(tmp_path)
    assert hangs
    assert ": failed, step 0" in said
    assert "rank 0: process 4194305 on" in said
    assert said.endswith("is gone")
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


# ---- many ranks ----------------------------------------------------------------------------------------------------


class CountingStore:
    """A store of one process, that counts what it is asked."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests, self._lock = 0, threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.requests += 1
            self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._lock:
            self.requests += 1
            return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            self.requests += len(keys)
            return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.requests += 1
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total


@pytest.mark.parametrize("ranks", [64, 1024])
def test_a_hang_costs_the_store_requests_in_proportion_to_the_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but one answer; one of those reports it, and each of the others asks for one line."""
    store = CountingStore()
    monkeypatch.setattr(Watch, "_connect", lambda _: store)
    for rank in range(ranks):
        store.set(f"process/{rank}", f"host {os.getpid()} {process_namespace()}")
    watches = [Watch(rank, ranks, 60.0) for rank in range(ranks - 1)]
    for watch in watches:
        watch.pace = 0.2 if ranks < 512 else 1.0  # as many threads as ranks, on two cores
    store.requests = 0
    with ThreadPoolExecutor(ranks) as pool:
        said = [one for one in pool.map(lambda watch: watch.report_of("asked-1"), watches) if one is not None]
    assert len(said) == 1
    assert f"rank {ranks - 1}" in said[0]
    assert store.requests < 30 * ranks


READS_WHILE_GROUPS_ARE_MADE = """
import os, threading, torch, torch.distributed as dist
from lockstep.launch.calls import record_calls, recorded
record_calls()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
over, seen, errors = threading.Event(), [], []
threading.excepthook = errors.append
def look():
    while not over.is_set():
        seen.append(len(recorded()))
threads = [threading.Thread(target=look) for _ in range(2)]
for _ in range(2):
    dist.all_reduce(torch.ones(1), group=dist.new_group([0], backend="gloo"))
for thread in threads: thread.start()
for _ in range(100):
    dist.new_group([0], backend="gloo")
over.set()
for thread in threads: thread.join()
print(max(seen), len(errors), flush=True)
os._exit(0)
"""


def test_calls_are_read_while_groups_are_made() -> None:
    """Torch's tables of groups change under a reader then: the watch of a rank would end, without a word. (While a
    call begins there are no readers: torch's recorder has crashed then.)
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", READS_WHILE_GROUPS_ARE_MADE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    most, errors = result.stdout.split()
    assert int(most) > 1
    assert int(errors) == 0, result.stderr[-2000:]
