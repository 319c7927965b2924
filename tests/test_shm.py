"""The one-host backend: operations against gloo's or arithmetic; PyTorch's engines on it; what it leaves behind."""

import os
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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lockstep.comm.collectives import all_reduce, all_reduce_async, new_buffer
from lockstep.comm.shm import segment
from lockstep.comm.shm.board import CELL_BYTES
from lockstep.comm.shm.shared import held_bytes
from lockstep.errors import RankError
from lockstep.world import World
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shm backend is Linux's")

LENGTHS = (1, 2, 3, 1000, CELL_BYTES // 4, CELL_BYTES // 4 + 1, 3 * CELL_BYTES // 4 + 7)
"""In float32: nothing to share out, one cell, just more than one, several."""
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


def numbers(length: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Small integers, so that every sum is exact in every dtype and order."""
    return ((torch.arange(length) + 3 * rank) % 5).to(dtype)


def left_in_shm() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("lockstep-*")}


def same(got: Tensor, expected: Tensor, what: str) -> None:
    """torch compares no wide unsigned integers; their bytes it does."""
    assert got.dtype == expected.dtype, what
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), what


# ---- operations ---------------------------------------------------------------------------------------------


def check_reductions(world: World) -> None:
    ranks = range(world.size)
    for dtype in DTYPES:
        for length in LENGTHS if dtype == torch.float32 else (0, 5, CELL_BYTES // dtype.itemsize + 3):
            tensor = numbers(length, dtype, world.rank)
            dist.all_reduce(tensor)
            total = sum(numbers(length, torch.int64, r) for r in ranks)
            assert isinstance(total, Tensor)
            same(tensor, total.to(dtype), f"all_reduce {dtype} {length}")
    for op, expected in (
        (dist.ReduceOp.MAX, max(ranks) + 1),
        (dist.ReduceOp.MIN, 1),
        (dist.ReduceOp.PRODUCT, torch.tensor([r + 1 for r in ranks]).prod().item()),
        (dist.ReduceOp.AVG, sum(r + 1 for r in ranks) / world.size),
    ):
        tensor = torch.full((7,), float(world.rank + 1))
        dist.all_reduce(tensor, op=op)
        assert tensor.tolist() == [expected] * 7, op
    flags = torch.tensor([1 << world.rank])
    dist.all_reduce(flags, op=dist.ReduceOp.BOR)
    assert flags.item() == (1 << world.size) - 1
    complex_ = torch.full((3,), 1 + 2j)
    dist.all_reduce(complex_)
    assert complex_.tolist() == [world.size * (1 + 2j)] * 3


def check_same_bits(world: World) -> None:
    """Real numbers: every rank must hold the same bits, or ranks drift apart."""
    for length in (100, CELL_BYTES):
        tensor = torch.randn(length, generator=torch.Generator().manual_seed(world.rank))
        exact = sum(torch.randn(length, generator=torch.Generator().manual_seed(r)).double() for r in range(world.size))
        dist.all_reduce(tensor)
        assert isinstance(exact, Tensor)
        assert torch.allclose(tensor.double(), exact, atol=1e-5)
        everyone = [torch.empty_like(tensor) for _ in range(world.size)]
        dist.all_gather(everyone, tensor)
        assert all(torch.equal(other, tensor) for other in everyone)


def check_collectives(world: World) -> None:
    """Against gloo, which has them all, on uneven and large sizes."""
    gloo = dist.new_group(backend="gloo")
    rank, size = world.rank, world.size
    for length in (1, 1000, CELL_BYTES // 4 + 13):
        mine = torch.randint(100, (length,), generator=torch.Generator().manual_seed(rank)).float()
        for root in {0, size - 1}:
            ours, theirs = mine.clone(), mine.clone()
            dist.broadcast(ours, root)
            dist.broadcast(theirs, root, group=gloo)
            same(ours, theirs, "broadcast")
            ours, theirs = mine.clone(), mine.clone()
            dist.reduce(ours, root)
            dist.reduce(theirs, root, group=gloo)
            if rank == root:
                same(ours, theirs, "reduce")
            parts = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
            dist.gather(mine, parts, root)
            if parts is not None:
                for other, part in enumerate(parts):
                    expected = torch.randint(100, (length,), generator=torch.Generator().manual_seed(other)).float()
                    same(part, expected, "gather")
            given = [mine + r for r in range(size)] if rank == root else None
            ours, theirs = torch.empty_like(mine), torch.empty_like(mine)
            dist.scatter(ours, given, root)
            dist.scatter(theirs, given, root, group=gloo)
            same(ours, theirs, "scatter")
        ours, theirs = mine.new_empty(size * length), mine.new_empty(size * length)
        dist.all_gather_into_tensor(ours, mine)
        dist.all_gather_into_tensor(theirs, mine, group=gloo)
        same(ours, theirs, "all_gather_into_tensor")
        whole = torch.cat([mine + r for r in range(size)])
        kept = whole.clone()
        ours, theirs = torch.empty_like(mine), torch.empty_like(mine)
        dist.reduce_scatter_tensor(ours, whole)
        same(whole, kept, "reduce_scatter leaves its input")
        dist.reduce_scatter_tensor(theirs, whole, group=gloo)
        same(ours, theirs, "reduce_scatter_tensor")
        ours, theirs = torch.empty_like(whole), torch.empty_like(whole)
        dist.all_to_all_single(ours, whole)
        dist.all_to_all_single(theirs, whole, group=gloo)
        same(ours, theirs, "all_to_all_single")
    # uneven: rank r gives s + 1 + r rows to rank s
    rows = [s + 1 + rank for s in range(size)]
    arriving = [rank + 1 + r for r in range(size)]
    given_rows = torch.arange(sum(rows) * 3.0).view(-1, 3) + 1000 * rank
    ours, theirs = torch.empty(sum(arriving), 3), torch.empty(sum(arriving), 3)
    dist.all_to_all_single(ours, given_rows, arriving, rows)
    dist.all_to_all_single(theirs, given_rows, arriving, rows, group=gloo)
    same(ours, theirs, "uneven all_to_all_single")
    large = [CELL_BYTES if s == 0 else 1 for s in range(size)]  # far more turns for one pair than for the others
    outputs = [torch.empty(CELL_BYTES if rank == 0 else 1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((n,), float(rank)) for n in large])
    assert [int(o[0]) for o in outputs] == list(range(size))
    assert [int(o[-1]) for o in outputs] == list(range(size))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]


def check_messages(world: World) -> None:
    """Both ways at once, larger than the mailbox; tags out of order; a pair at a time."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for length in (0, 1, 3_000_000):
        out, came = torch.full((length,), float(world.rank)), torch.empty(length)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, came, left)]):
            work.wait()
        assert bool((came == left).all())
    first, second = torch.empty(1), torch.empty(1)
    sends = [dist.isend(torch.tensor([float(tag)]), right, tag=tag) for tag in (1, 2)]
    dist.recv(second, left, tag=2)
    dist.recv(first, left, tag=1)
    for send in sends:
        send.wait()
    assert (first.item(), second.item()) == (1, 2)
    later, sooner = torch.empty(1), torch.empty(1)
    works = [dist.irecv(later, left, tag=8), dist.irecv(sooner, left, tag=9)]  # sent in the other order
    dist.send(torch.tensor([9.0]), right, tag=9)
    works[1].wait()
    dist.send(torch.tensor([8.0]), right, tag=8)
    works[0].wait()
    assert (later.item(), sooner.item()) == (8, 9)
    send = dist.isend(torch.zeros(3), right)
    with pytest.raises(ValueError, match="message of 12 bytes came with tag 0, but 8 are received here"):
        dist.recv(torch.zeros(2), left)
    send.wait()


def check_first_receive(world: World) -> None:
    """Everybody receives first, on a group that has never sent anything; then leaves before its message is read."""
    group = dist.new_group()
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    came = torch.empty(1)
    receiving = dist.irecv(came, group_src=left, group=group)
    dist.isend(torch.tensor([float(world.rank)]), group_dst=right, group=group).wait()
    receiving.wait()
    assert came.item() == left
    parting = dist.new_group()
    if world.rank == 0:
        dist.send(torch.tensor([5.0]), group_dst=1, group=parting)
        dist.destroy_process_group(parting)
    elif world.rank == 1:
        time.sleep(0.3)
        dist.recv(came, group_src=0, group=parting)
        assert came.item() == 5
    dist.barrier()


def check_callbacks(world: World) -> None:
    """A callback may use the group again, and wait for it, as PyTorch's PowerSGD hook does."""

    def again(future: "torch.futures.Future[list[Tensor]]") -> Tensor:
        tensor = future.value()[0]
        dist.all_reduce(tensor)
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    tensor = torch.ones(1000)
    result = dist.all_reduce(tensor, async_op=True).get_future().then(again).wait()
    assert bool((result == world.size**3).all())


def check_mistakes_do_not_poison(world: World) -> None:
    with pytest.raises(ValueError, match=r"torch has no BAND of torch.float32"):
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)
    pair, both = torch.ones(1, dtype=torch.cfloat), torch.ones(world.size, dtype=torch.cfloat)
    with pytest.raises(ValueError, match=r"PRODUCT of torch.complex64 is not available"):
        dist.reduce_scatter_tensor(pair, both, op=dist.ReduceOp.PRODUCT)
    with pytest.raises(ValueError, match="AVG is for floating-point"):
        all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG, algorithm="ring")
    with pytest.raises(ValueError, match="this one is sparse; use --backend gloo"):
        dist.all_reduce(torch.ones(2).to_sparse())
    assert all_reduce(torch.ones(1)).item() == world.size
    assert all_reduce(torch.ones(1), algorithm="ring").item() == world.size


def check_layouts(world: World) -> None:
    """Dense tensors in another order than row by row; splits that only some ranks spell out."""
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    expected = image * world.size
    dist.all_reduce(image)
    assert torch.equal(image, expected)
    matrix = torch.arange(6.0).view(2, 3).t() * (world.rank == 0)
    dist.broadcast(matrix, 0)
    assert torch.equal(matrix, torch.arange(6.0).view(2, 3).t())
    out, given = torch.empty(world.size), torch.arange(world.size) + 10.0 * world.rank
    splits = [1] * world.size if world.rank == 0 else None
    dist.all_to_all_single(out, given, splits, splits)
    assert out.tolist() == [10.0 * r + world.rank for r in range(world.size)]


def check_beside_by_hand(world: World) -> None:
    """A user's own messages on a group whose all-reduces are by hand, at the same time."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for number in range(20):
        reduced = torch.full((100,), float(number))
        pending = all_reduce_async(reduced, algorithm="ring")
        came = torch.empty(1)
        receiving = dist.irecv(came, left)
        dist.send(torch.tensor([1000.0 + number]), right)
        receiving.wait()
        pending.wait()
        assert came.item() == 1000 + number
        assert bool((reduced == number * world.size).all())


def check_groups(world: World) -> None:
    """Sub-groups, each with its own memory, at work at the same time; a group of one."""
    evens = dist.new_group([r for r in range(world.size) if r % 2 == 0])
    alone = [dist.new_group([r]) for r in range(world.size)][world.rank]
    tensor = torch.tensor([float(world.rank + 1)])
    if world.rank % 2 == 0:
        dist.all_reduce(tensor, group=evens)
        assert tensor.item() == sum(r + 1 for r in range(0, world.size, 2))
    dist.all_reduce(tensor, group=alone)
    copies = [torch.zeros(1)]
    dist.all_gather(copies, tensor, group=alone)
    assert torch.equal(copies[0], tensor)
    world_tensor = torch.ones(CELL_BYTES)
    works = [dist.all_reduce(world_tensor, async_op=True) for _ in range(3)]  # in order, on one lane
    for work in works:
        work.wait()
    assert bool((world_tensor == world.size**3).all())


def check_shared(world: World) -> None:
    """Tensors made in shared memory: reduced where they lie, freed when they are no longer used, odd lengths too."""
    for length in (1, world.size - 1, 1000, 300_001):
        tensor = new_buffer(length, torch.float32, torch.device("cpu"))
        assert held_bytes() == 4 * length
        for _ in range(3):
            tensor.copy_(numbers(length, torch.float32, world.rank))
            dist.all_reduce(tensor)
            total = sum(numbers(length, torch.float32, r) for r in range(world.size))
            assert isinstance(total, Tensor)
            same(tensor, total, f"shared {length}")
        whole = tensor.clone()
        dist.all_reduce(tensor[: length // 2])  # a part of it is an ordinary tensor
        same(tensor[length // 2 :], whole[length // 2 :], "the rest stays")
        del tensor
        assert held_bytes() == 0
    dist.barrier()


def check_disagreement(world: World) -> None:
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


def check_refusals(world: World) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_reduce(torch.zeros(4, 4).t()[1:])
    with pytest.raises(ValueError, match="AVG is for floating-point"):
        dist.all_reduce(torch.zeros(4, dtype=torch.int32), op=dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="needs 2 tensors of 3"):
        dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.zeros(3))
    with pytest.raises(ValueError, match="give src to recv"):
        dist.recv(torch.zeros(1))
    dist.barrier()


def check_overlap(world: World) -> None:
    """An asynchronous collective is done without anybody waiting for it."""
    tensor = torch.ones(4 * CELL_BYTES)
    work = dist.all_reduce(tensor, async_op=True)
    ended = []
    work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))
    deadline = time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    assert ended
    assert work.is_completed()
    work.wait()
    assert bool((tensor == world.size).all())


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_operations(nproc: int) -> None:
    on_ranks(
        run_checks,
        nproc,
        (
            *("reductions", "same_bits", "collectives", "messages", "first_receive", "groups", "overlap", "shared"),
            *("callbacks", "mistakes_do_not_poison", "layouts", "beside_by_hand"),
        ),
        timeout=100,
    )
    assert not left_in_shm()


def test_refusals() -> None:
    on_ranks(run_checks, 2, ("refusals", "disagreement"))


def run_checks(world: World, names: tuple[str, ...]) -> None:
    assert dist.get_backend() == "shm"
    for name in names:
        globals()[f"check_{name}"](world)


# ---- PyTorch's engines ---------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def engines(world: World) -> None:
    inputs = torch.randn(world.size * 3, 12, generator=torch.Generator().manual_seed(1))
    mine = inputs.chunk(world.size)[world.rank]
    alone = Net()
    alone(inputs).square().mean().backward()
    expected = [p.grad for p in alone.parameters()]

    ddp = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    for _ in range(3):
        ddp.zero_grad()
        ddp(mine).square().mean().backward()
    for p, e in zip(ddp.parameters(), expected, strict=True):
        assert p.grad is not None
        assert e is not None
        assert torch.allclose(p.grad, e, atol=1e-6)

    mesh = init_device_mesh("cpu", (world.size,))
    sharded = Net()
    for layer in (sharded.layers[0], sharded.layers[2], sharded):
        fully_shard(layer, mesh=mesh)
    for _ in range(3):
        sharded.zero_grad()
        sharded(mine).square().mean().backward()
    for p, e in zip(sharded.parameters(), expected, strict=True):
        assert isinstance(p.grad, DTensor)
        assert e is not None
        assert torch.allclose(p.grad.full_tensor(), e, atol=1e-6)

    matrix = torch.arange(30.0).view(10, 3)  # uneven over 3 ranks
    rows = distribute_tensor(matrix, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), matrix)
    assert torch.equal((rows.t() @ rows).redistribute(mesh, [Replicate()]).to_local(), matrix.t() @ matrix)


def test_pytorch_engines_run_unchanged() -> None:
    on_ranks(engines, 3, timeout=100)


def pipeline(world: World) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    inputs = torch.randn(8, 6)
    stage = PipelineStage(whole[world.rank], world.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
    if world.rank == 0:
        schedule.step(inputs)
    else:
        out = schedule.step(target=torch.zeros(8, 6))
        assert torch.allclose(out, whole(inputs), atol=1e-6)
    gradients = [p.grad for p in whole[world.rank].parameters()]
    assert all(g is not None for g in gradients)


def test_pytorch_pipelining_runs_unchanged() -> None:
    on_ranks(pipeline, 2)


def test_import_lockstep_registers_it_without_importing_torch() -> None:
    code = (
        "import lockstep, sys; assert 'torch' not in sys.modules; "
        "import torch.distributed as dist; print(dist.Backend.SHM)"
    )
    other = "import torch.distributed as dist, lockstep; print(dist.Backend.SHM)"
    for text in (code, other):
        assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True).stdout == "shm\n"


# ---- what goes wrong -----------------------------------------------------------------------------------------


def one_dies(world: World) -> None:
    dist.all_reduce(torch.ones(1))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) has ended"):
        dist.all_reduce(torch.ones(1_000_000))
    assert time.monotonic() - start < 5
    with pytest.raises(RuntimeError, match="cannot go on after an earlier failure"):
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    with pytest.raises(RankError, match=r"rank 1 failed first.*SIGKILL"):
        on_ranks(one_dies, 2)
    assert not left_in_shm()


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
