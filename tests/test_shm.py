"""The one-host backend: every operation, against gloo's or against arithmetic."""

import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.collectives import all_reduce, all_reduce_async, new_buffer
from lockstep.comm.shm import semaphore
from lockstep.comm.shm.board import CELL_BYTES
from lockstep.comm.shm.shared import held_bytes
from lockstep.layout.world import World
from tests.ranks import LONG, left_in_shm, on_ranks

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
    with pytest.raises(ValueError, match=r"message of 3 torch.float32 .* tag 0, but 2 torch.float32 are"):
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
    for op in (dist.all_reduce, dist.reduce):
        alone_before = tensor.clone()
        op(tensor, **({"group_dst": 0} if op is dist.reduce else {}), group=alone)
        assert torch.equal(tensor, alone_before)
    copies = [torch.zeros(1)]
    dist.all_gather(copies, tensor, group=alone)
    assert torch.equal(copies[0], tensor)
    for perform in (
        lambda out: dist.reduce_scatter_tensor(out, tensor, group=alone),
        lambda out: dist.all_to_all_single(out, tensor, group=alone),
        lambda out: dist.scatter(out, [tensor], group_src=0, group=alone),
        lambda out: dist.gather(tensor, [out], group_dst=0, group=alone),
    ):
        out = torch.zeros(1)
        perform(out)
        assert torch.equal(out, tensor)
    dist.barrier(group=alone)
    world_tensor = torch.ones(CELL_BYTES)
    works = [dist.all_reduce(world_tensor, async_op=True) for _ in range(3)]  # in order, on one lane
    for work in works:
        work.wait()
    assert bool((world_tensor == world.size**3).all())


def check_slow_maker(world: World) -> None:
    """Who makes the shared memory is slow at it: the others must not use it before it is prepared."""
    prepare = semaphore.initialize

    def slowly(address: int, value: int) -> None:
        time.sleep(0.01)
        prepare(address, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(semaphore, "initialize", slowly)
        group = dist.new_group(timeout=timedelta(seconds=10))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == world.size


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


def check_overlap(world: World) -> None:
    """An asynchronous collective is done without anybody waiting for it."""
    tensor = torch.ones(4 * CELL_BYTES)
    work = dist.all_reduce(tensor, async_op=True)
    ended = []
    work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))
    deadline = time.monotonic() + LONG
    while not ended and time.monotonic() < deadline:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    assert ended
    assert work.is_completed()
    work.wait()
    assert bool((tensor == world.size).all())


@pytest.mark.alone
@pytest.mark.parametrize("nproc", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_operations(nproc: int) -> None:
    on_ranks(
        run_checks,
        nproc,
        (
            *("reductions", "same_bits", "collectives", "messages", "first_receive", "groups", "overlap", "shared"),
            *("callbacks", "mistakes_do_not_poison", "layouts", "beside_by_hand", "slow_maker"),
        ),
        timeout=LONG,
    )
    assert not left_in_shm()


def run_checks(world: World, names: tuple[str, ...]) -> None:
    assert dist.get_backend() == "shm"
    for name in names:
        globals()[f"check_{name}"](world)
