"""What goes wrong on the one-host backend: mistakes, ranks that disagree, die or fall silent, what is left behind."""

import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.shm import segment
from lockstep.layout.world import World
from tests.ranks import left_in_shm, on_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shm backend is Linux's")


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
        print(f"{time.monotonic() - start < 5} {error}", flush=True)
os._exit(0)  # the store's file is the other rank's to remove, and it is dead
"""


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path) -> None:
    """Without a launcher, which would end the survivor before it could say anything."""
    commands = [[sys.executable, "-c", SURVIVOR, str(rank), str(tmp_path / "store")] for rank in (0, 1)]
    survivor, victim = (subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands)
    out, _ = survivor.communicate(timeout=60)
    victim.communicate(timeout=60)
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
    stranger = Path("/dev/shm") / re.sub(r"lockstep-\d+", "lockstep-1", name)  # another container's: not ours to judge
    stranger.touch()
    try:
        mine = segment.Segment.create(4096)
        assert name not in left_in_shm()
        assert {mine.name, stranger.name} <= left_in_shm()
        mine.forget_name()
    finally:
        stranger.unlink()
    assert not left_in_shm()


def test_a_full_shm_is_one_clear_line() -> None:
    with pytest.raises(
        ValueError, match=r"MiB were asked for and /dev/shm has \d+ MiB free.*--shm-size.*--backend gloo"
    ):
        segment.Segment.create(1 << 50)
    assert not left_in_shm()
