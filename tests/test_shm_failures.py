"""What goes wrong on the one-host backend: mistakes, ranks that disagree, die or fall silent, what is left behind."""

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.shm import segment, semaphore
from lockstep.layout.world import World
from tests.ranks import LONG, left_in_shm, on_ranks

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="the shm backend is Linux's"),
]


def refusals(world: World) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_reduce(torch.zeros(4, 4).t()[1:])
    with pytest.raises(ValueError, match="AVG is for floating-point"):
        dist.all_reduce(torch.zeros(4, dtype=torch.int32), op=dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="needs 2 tensors of 3"):
        dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.zeros(3))
    with pytest.raises(ValueError, match="give src to recv"):
        dist.recv(torch.zeros(1))
    dist.barrier()


def disagreement(world: World) -> None:
    """Different lengths, dtypes or collectives: an error on every rank, not somebody else's bytes."""
    for mine in (torch.ones(3 + world.rank), torch.ones(4, dtype=(torch.float32, torch.float64)[world.rank])):
        group = dist.new_group()
        with pytest.raises(
            RuntimeError, match=r"ranks disagree: rank \d calls all_reduce of \d float\d\d elements, and"
        ):
            dist.all_reduce(mine, group=group)
    group = dist.new_group()
    with pytest.raises(RuntimeError, match=r"calls (barrier|all_reduce) of .* (barrier|all_reduce) of"):
        dist.all_reduce(torch.ones(3), group=group) if world.rank else dist.barrier(group=group)
    with pytest.raises(ValueError, match="the root is rank 5, but this group has ranks 0 to 1"):
        dist.broadcast(torch.ones(1), group_src=5, group=dist.group.WORLD)
    dist.barrier()


def all_to_all_mistakes(world: World) -> None:
    """Splits that do not fit the tensors are refused before anything is written; peers that disagree, on every rank."""
    guard = torch.full((1000,), 7.0)
    output = guard[:4]
    with pytest.raises(ValueError, match=r"splits \[500, 500\] do not cut 4 rows"):
        dist.all_to_all_single(output, torch.ones(4), output_split_sizes=[500, 500], input_split_sizes=[2, 2])
    with pytest.raises(ValueError, match=r"splits \[4\] do not cut 4 rows into one part for each of 2"):
        dist.all_to_all_single(output, torch.ones(4), output_split_sizes=[4], input_split_sizes=[2, 2])
    with pytest.raises(ValueError, match=r"splits \[-1, 5\]"):
        dist.all_to_all_single(output, torch.ones(4), output_split_sizes=[2, 2], input_split_sizes=[-1, 5])
    with pytest.raises(ValueError, match=r"needs tensors of one dtype, but got torch.float32 and torch.float64"):
        dist.group.WORLD.alltoall_base(output, torch.ones(4, dtype=torch.float64), [], [])
    with pytest.raises(ValueError, match="needs 2 tensors to send and to receive, but got 1 and 2"):
        dist.group.WORLD.alltoall([torch.zeros(1), torch.zeros(1)], [torch.ones(1)])
    assert torch.equal(guard, torch.full((1000,), 7.0))
    for sent, expected in ((3, 2), (1, 2), (2, 0)):  # what rank 0 sends to rank 1, and what rank 1 expects
        group = dist.new_group()
        splits = [1, sent] if world.rank == 0 else [1, 1]
        wanted = [1, 1] if world.rank == 0 else [expected, 1]
        target = torch.full((1000,), 7.0)
        with pytest.raises(RuntimeError, match=f"rank 0 sends {sent} elements to rank 1, which expects {expected}"):
            dist.all_to_all_single(target[: sum(wanted)], torch.ones(sum(splits)), wanted, splits, group=group)
        assert torch.equal(target, torch.full((1000,), 7.0))
    lists = [torch.empty(0), torch.empty(0)]
    dist.all_to_all(lists, [torch.empty(0), torch.empty(0)])  # nothing at all is fine


def other_disagreements(world: World) -> None:
    """In the reduction, the root, complex against real, strides, the shared buffer: an error that names both calls."""
    sum_or_max = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[world.rank]
    image = torch.ones(1, 2, 3, 3)
    strided = image.to(memory_format=torch.channels_last) if world.rank else image
    real = torch.ones(4) if world.rank else torch.ones(2, dtype=torch.complex64)
    calls = {
        "by (SUM|MAX), and rank . all_reduce of 4 float32 elements by (SUM|MAX)": lambda g: dist.all_reduce(
            torch.ones(4), op=sum_or_max, group=g
        ),
        "row-major order|another order of strides": lambda g: dist.all_reduce(strided, group=g),
        "complex64.*float32|float32.*complex64": lambda g: dist.all_reduce(real, group=g),
        "with root (0|1)": lambda g: dist.reduce(torch.ones(3), group_dst=world.rank, group=g),
        "broadcast of 3 .* with root (0|1)": lambda g: dist.broadcast(torch.ones(3), group_src=world.rank, group=g),
    }
    for words, call in calls.items():
        group = dist.new_group()
        with pytest.raises(RuntimeError, match=f"ranks disagree: .*({words})"):
            call(group)
    group = dist.new_group()
    first, second = (group.shared_empty(64, torch.float32) for _ in range(2))
    with pytest.raises(RuntimeError, match=r"in shared buffer (0|1), and rank . .* in shared buffer (0|1)"):
        dist.all_reduce(second if world.rank else first, group=group)
    group = dist.new_group()
    if world.rank == 0:
        dist.send(torch.ones(2, dtype=torch.float64), 1, group=group)
    else:
        with pytest.raises(ValueError, match=r"2 torch.float64 elements came with tag 0, but 4 torch.float32"):
            dist.recv(torch.ones(4), 0, group=group)
    dist.barrier()


def test_all_to_all_writes_only_where_it_may() -> None:
    on_ranks(all_to_all_mistakes, 2)


def test_ranks_that_disagree_in_anything_are_told_so() -> None:
    on_ranks(other_disagreements, 2)


def test_a_clock_that_is_set_back_does_not_delay_anything() -> None:
    """Waiting goes by a clock that nobody sets: the wall clock may stand a year back."""
    memory = torch.zeros(64, dtype=torch.uint8)
    semaphore.initialize(memory.data_ptr(), 0)
    with subprocess.Popen(["sleep", "60"]) as child:
        peer = semaphore.Peer(1, child.pid)
        ended = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(semaphore.time, "time", lambda: 1e9)
            child.kill()
            with pytest.raises(RuntimeError, match="has ended"):
                semaphore.wait(memory.data_ptr(), peer, 30.0, beside=True)
        assert time.monotonic() - ended < 20
        peer.close()
    assert semaphore.HAS_CLOCKWAIT or sys.platform != "linux"


def test_threads_may_ask_at_once_whether_a_rank_has_ended() -> None:
    """A pipeline's lanes wait for one neighbour each on its own thread, and may look in the same moment."""
    with subprocess.Popen(["sleep", "10"]) as child, ThreadPoolExecutor(4) as threads:
        peer = semaphore.Peer(1, child.pid)
        until = time.monotonic() + 0.5

        def ask() -> bool:
            while time.monotonic() < until:
                if peer.has_ended():
                    return True
            return False

        asking = [threads.submit(ask) for _ in range(4)]
        assert [answer.result() for answer in asking] == [False] * 4
        child.kill()
        child.wait()
        assert peer.has_ended()
        peer.close()


def test_mistakes_are_refused_with_a_reason() -> None:
    on_ranks(refusals, 2)


def test_ranks_that_disagree_are_told_so() -> None:
    on_ranks(disagreement, 2)


SURVIVOR = """
import os, signal, sys, time, torch, torch.distributed as dist, lockstep
rank = int(sys.argv[1])
dist.init_process_group("shm", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
dist.all_reduce(torch.ones(1))
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(2):
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1_000_000))
    except RuntimeError as error:
        print(f"{time.monotonic() - start < 60} {error}", flush=True)
os._exit(0)  # the store's file is the other rank's to remove, and it is dead
"""


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path) -> None:
    """Without a launcher, which would end the survivor before it could say anything."""
    commands = [[sys.executable, "-c", SURVIVOR, str(rank), str(tmp_path / "store")] for rank in (0, 1)]
    survivor, victim = (subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands)
    out, _ = survivor.communicate(timeout=LONG)
    victim.communicate(timeout=LONG)
    assert victim.returncode == -signal.SIGKILL
    first, second = out.splitlines()
    assert re.fullmatch(r"True rank 1 \(process \d+\) has ended, and this rank waits for it", first)
    assert re.fullmatch(r"True shm group \S+ cannot go on after an earlier failure: rank 1 .*", second)
    assert not left_in_shm()


def long_wait(world: World) -> float:
    """CPU seconds that a rank spends on waiting for one that comes late."""
    dist.barrier()
    if world.rank == 1:
        time.sleep(2)
    before = time.process_time()
    dist.all_reduce(torch.ones(1))
    return time.process_time() - before


def test_waiting_burns_no_core() -> None:
    assert on_ranks(long_wait, 2)[0] < 0.5  # of 2 s


def one_is_silent(world: World) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) did not answer within 1 s"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


def test_a_silent_rank_is_an_error_after_the_timeout() -> None:
    on_ranks(one_is_silent, 2)


def test_what_a_killed_process_left_is_removed_at_the_next_start_by_owner() -> None:
    code = (
        "from lockstep.comm.shm.segment import Segment; s = Segment.create(4096); print(s.name, flush=True); "
        "import time; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert segment.remove_leftovers() == []  # its owner lives
        assert name in left_in_shm()
        process.kill()
        process.wait()
    assert name in left_in_shm()
    folder = Path("/dev/shm") / f"{name}-memory"  # of a dead launcher's: its ranks' checkpoints in memory
    folder.mkdir()
    stranger = Path("/dev/shm") / re.sub(r"lockstep-\d+", "lockstep-1", name)  # another container's: not ours to judge
    stranger.touch()
    try:
        mine = segment.Segment.create(4096)
        assert name not in left_in_shm()
        assert {mine.name, stranger.name} <= left_in_shm()
        mine.forget_name()
    finally:
        stranger.unlink()
        folder.rmdir()
    assert not left_in_shm()


def test_a_full_shm_is_one_clear_line() -> None:
    with pytest.raises(
        ValueError, match=r"MiB were asked for and /dev/shm has \d+ MiB free.*--shm-size.*--backend gloo"
    ):
        segment.Segment.create(1 << 50)
    assert not left_in_shm()
