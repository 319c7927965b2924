"""Collectives by hand against the native ones and against arithmetic, on any number of ranks and any length."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep import DataParallel, UserError
from lockstep.comm import collectives
from lockstep.comm.algorithms import (
    ALGORITHMS,
    PIECE_BYTES,
    binary_tree,
    ring_all_gather,
    ring_reduce_scatter,
    shifted_binary_tree,
    tree_broadcast,
)
from lockstep.comm.by_hand import ALGORITHM_NAMES, all_reduce_over
from lockstep.comm.cost import Prices, Sample, choose, cost, fit
from lockstep.comm.ledger import Ledger, recording
from lockstep.comm.wire import Wire
from lockstep.layout.world import World
from tests.ranks import LONG, on_ranks

LENGTHS = (0, 1, 2, 5, 1000, 2 * PIECE_BYTES // 4 + 3)
DTYPES = (
    *(torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


# ---- all-reduce ---------------------------------------------------------------------------------------------


def against_native(world: World, backend: str, per_node: int) -> None:
    # What the launcher would say on nodes of this many ranks; it says less on a last node that is not full.
    is_last_node = world.rank >= world.size // per_node * per_node
    os.environ["LOCAL_WORLD_SIZE"] = str(world.size % per_node if is_last_node else per_node)
    group = dist.new_group(backend=backend)
    wire = Wire(group)
    for algorithm in ALGORITHMS:
        for length in LENGTHS:
            generator = torch.Generator().manual_seed(world.rank)
            given = torch.randn(length, generator=generator)
            native, ours = given.clone(), given.clone()
            dist.all_reduce(native)
            all_reduce_over(wire, ours, algorithm)
            assert torch.allclose(ours, native, rtol=1e-6, atol=1e-6), (algorithm, length)
            everyone = [torch.empty_like(ours) for _ in range(world.size)]
            if length:
                dist.all_gather(everyone, ours)
                assert all(torch.equal(other, ours) for other in everyone), (algorithm, length, "differs between ranks")
        for dtype in DTYPES:
            whole = ((torch.arange(777) + world.rank) % 7).to(dtype)
            total = sum((torch.arange(777) + r) % 7 for r in range(world.size))
            all_reduce_over(wire, whole, algorithm)
            assert isinstance(total, Tensor)
            assert torch.equal(whole.long(), total), (algorithm, dtype)
        for op, value in ((dist.ReduceOp.MAX, world.size), (dist.ReduceOp.AVG, (world.size + 1) / 2)):
            tensor = torch.full((9,), float(world.rank + 1))
            all_reduce_over(wire, tensor, algorithm, op)
            assert tensor.tolist() == [value] * 9, (algorithm, op)
        square = torch.full((6, 6), float(world.rank)).t()[1:]  # not contiguous
        all_reduce_over(wire, square, algorithm)
        assert bool((square == sum(range(world.size))).all())


@pytest.mark.parametrize(
    ("nproc", "backend", "per_node"), [(2, "gloo", 1), (3, "shm", 2), (4, "gloo", 2), (5, "shm", 2), (7, "shm", 4)]
)
def test_all_reduce_equals_the_native_one(nproc: int, backend: str, per_node: int) -> None:
    on_ranks(against_native, nproc, backend, per_node, timeout=LONG)


def parts_of_it(world: World) -> None:
    wire, rank, size = Wire(), world.rank, world.size
    for length in (0, 1, 7, 1000):
        whole = torch.arange(length) + rank
        total = torch.arange(length) * size + sum(range(size))
        chunks = whole.clone().tensor_split(size)
        assert torch.equal(ring_reduce_scatter(wire, chunks, torch.add), total.tensor_split(size)[rank])
        mine = [torch.full((3,), r if r == rank else -1) for r in range(size)]
        ring_all_gather(wire, mine)
        assert [int(m[0]) for m in mine] == list(range(size))
        copied = whole.clone()
        tree_broadcast(wire, copied)
        assert torch.equal(copied, torch.arange(length))


@pytest.mark.parametrize("nproc", [3, 4])
def test_reduce_scatter_all_gather_and_broadcast_by_hand(nproc: int) -> None:
    on_ranks(parts_of_it, nproc)


@given(st.integers(1, 70))
def test_the_two_trees_span_all_ranks_and_complement_each_other(size: int) -> None:
    inner = []
    for tree in (binary_tree, shifted_binary_tree):
        links = {rank: tree(rank, size) for rank in range(size)}
        roots = [rank for rank, (parent, _) in links.items() if parent is None]
        assert len(roots) == 1
        reached, frontier, depth = set(roots), roots, 0
        while frontier:
            frontier = [child for rank in frontier for child in links[rank][1]]
            assert not reached & set(frontier)
            reached |= set(frontier)
            depth += 1
        assert reached == set(range(size))
        assert depth <= size.bit_length()
        assert all(links[child][0] == rank for rank, (_, children) in links.items() for child in children)
        inner.append({rank for rank, (_, children) in links.items() if children})
    if size > 2:
        assert not inner[0] & inner[1]


# ---- primitives ---------------------------------------------------------------------------------------------


def every_primitive(world: World) -> None:
    rank, size = world.rank, world.size
    ledger = Ledger()
    ledger.open()
    mine = torch.full((4,), float(rank))
    with recording(ledger):
        assert collectives.all_reduce(mine.clone())[0] == sum(range(size))
        assert collectives.all_reduce_mean(mine.clone())[0] == (size - 1) / 2
        assert collectives.all_reduce_mean(mine.clone(), algorithm="ring")[0] == (size - 1) / 2
        assert collectives.broadcast(mine.clone(), src=1)[0] == 1
        assert collectives.all_gather(mine)[:, 0].tolist() == list(range(size))
        output = torch.empty(2)
        assert collectives.reduce_scatter(output, torch.arange(2.0 * size)).tolist() == [4 * rank, 4 * rank + 2]
        output = torch.empty(size)
        assert collectives.all_to_all(output, torch.arange(size) + 10.0 * rank).tolist() == [rank, 10 + rank]
        reduced = collectives.reduce(mine.clone(), dst=1)
        if rank == 1:
            assert reduced[0] == 1
        parts = [torch.empty(4) for _ in range(size)] if rank == 0 else None
        collectives.gather(mine, parts)
        if parts is not None:
            assert [int(p[0]) for p in parts] == [0, 1]
        given_parts = [torch.full((4,), 7.0 + r) for r in range(size)] if rank == 0 else None
        assert collectives.scatter(torch.empty(4), given_parts)[0] == 7 + rank
        if rank == 0:
            collectives.send(torch.tensor([5.0]), 1)
        else:
            assert collectives.recv(torch.empty(1), 0).item() == 5
        collectives.barrier()
        pending = collectives.all_reduce_async(mine, purpose="gradients", algorithm="tree")
        pending.wait()
    assert mine[0] == 1
    assert [e.operation for e in ledger.entries] == [
        *("all_reduce", "all_reduce", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"),
        *("reduce", "gather", "scatter", "send" if rank == 0 else "recv", "barrier", "all_reduce"),
    ]
    assert [e.nbytes for e in ledger.entries][:7] == [16, 16, 16, 16, 32, 16, 8]
    assert all(e.wait_ended is not None for e in ledger.entries)
    assert [e.purpose for e in ledger.entries][-1] == "gradients"


def test_every_primitive_is_counted() -> None:
    on_ranks(every_primitive, 2)


def test_primitives_do_nothing_in_a_world_of_one() -> None:
    mine = torch.ones(3)
    assert collectives.all_reduce(mine, algorithm="ring").tolist() == [1, 1, 1]
    assert collectives.all_gather(mine).shape == (1, 3)
    assert collectives.reduce_scatter(torch.empty(3), mine).tolist() == [1, 1, 1]
    assert collectives.all_to_all(torch.empty(3), mine).tolist() == [1, 1, 1]
    assert collectives.scatter(torch.empty(3), [mine]).tolist() == [1, 1, 1]
    collectives.barrier()


# ---- training with them -------------------------------------------------------------------------------------


def train_with(world: World, algorithm: str) -> list[float]:
    torch.manual_seed(0)
    model = DataParallel(
        nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)), "bucketed", 1e-4, algorithm=algorithm
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs = torch.randn(12, 5, generator=torch.Generator().manual_seed(1)).chunk(world.size)[world.rank]
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def train_with_all(world: World) -> None:
    native = torch.tensor(train_with(world, "native"))
    for algorithm in ALGORITHM_NAMES:
        assert torch.allclose(torch.tensor(train_with(world, algorithm)), native, atol=1e-6), algorithm


def test_data_parallel_trains_with_every_algorithm() -> None:
    on_ranks(train_with_all, 3, timeout=LONG)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(UserError, match=r"algorithm is 'torus', but it must be one of native, naive, tree, ring"):
        DataParallel(nn.Linear(2, 2), algorithm="torus")


# ---- the cost model -----------------------------------------------------------------------------------------


@given(
    st.sampled_from([2, 3, 4, 8]),
    st.floats(1e-6, 1e-3),
    st.floats(1e-11, 1e-8),
    st.floats(1e-11, 1e-8),
)
def test_the_fit_finds_the_prices_that_made_the_times(ranks: int, message: float, sent: float, added: float) -> None:
    true = Prices(message, sent, added, message / 5, sent / 7)
    sizes = [2**k for k in range(8, 26, 3)]
    samples = [Sample(a, ranks, s, true.predict(a, ranks, s)) for a in ALGORITHMS for s in sizes]
    found = fit(samples)
    for sample in samples:
        assert found.predict(sample.algorithm, ranks, sample.nbytes) == pytest.approx(sample.seconds, rel=1e-3)


def test_costs_are_the_formulas_of_the_text() -> None:
    ring = cost("ring", 4, 1000)
    assert (ring.messages, ring.nbytes, ring.added) == (6, 1500, 750)
    assert (ring.all_messages, ring.all_bytes) == (24, 6000)
    doubling = cost("recursive_doubling", 8, 1000)
    assert (doubling.messages, doubling.nbytes, doubling.added) == (3, 3000, 3000)
    folded = cost("halving_doubling", 3, 1000)
    assert (folded.messages, folded.nbytes, folded.added) == (4, 3000, 1500)
    nodes = cost("hierarchical", 4, 1000, ranks_per_node=2)
    assert (nodes.messages, nodes.nbytes, nodes.added) == (4, 3000, 1500)


def sent_bytes(world: World) -> None:
    """What an algorithm really sends, counted at the wire, is what its cost says of the busiest rank.

    An exchange sends and receives at once, so it counts by the larger of the two. Only in the double tree do exchanges
    overlap with each other, of different pieces: there all sending counts against all receiving.
    """

    class Counting(Wire):
        def exchange(self, send=(), receive=()):  # type: ignore[no-untyped-def]
            exchanges.append((sum(t.nbytes for t, _ in send), sum(t.nbytes for t, _ in receive)))
            return super().exchange(send, receive)

        def among(self, ranks: list[int]) -> "Counting":
            return Counting(self.group, [self.ranks[r] for r in ranks])

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    exchanges: list[tuple[int, int]] = []
    wire = Counting()
    assert wire.ranks_per_node == 2
    for name, algorithm in ALGORITHMS.items():
        exchanges.clear()
        algorithm(wire, torch.zeros(1024), torch.add)
        one_by_one = sum(max(sent, received) for sent, received in exchanges)
        overlapping = max(sum(sent for sent, _ in exchanges), sum(received for _, received in exchanges))
        busiest = torch.tensor(float(overlapping if name == "double_tree" else one_by_one))
        dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
        assert busiest.item() == cost(name, world.size, 4096, ranks_per_node=2).nbytes, name


def test_the_wire_carries_what_the_cost_says() -> None:
    on_ranks(sent_bytes, 4)


def auto(world: World) -> str:
    wire = Wire()
    small, large = choose(wire, 8), choose(wire, 1 << 28)
    chosen = collectives.all_gather_objects((small, large))
    assert all(c == chosen[0] for c in chosen), "ranks must choose alike, or they hang"
    tensor = torch.ones(10)
    all_reduce_over(wire, tensor, "auto")
    assert bool((tensor == world.size).all())
    return large


def test_auto_chooses_alike_on_every_rank() -> None:
    assert set(on_ranks(auto, 3)) <= set(ALGORITHMS)


def slow_wire(world: World) -> tuple[float, float]:
    """The ring of n ranks sends 2(n-1) messages one after the other: a delay of each shows up as often."""
    times = []
    for delay in (0.0, 0.02):
        wire, tensor = Wire(delay=delay), torch.ones(8)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(3):
            all_reduce_over(wire, tensor, "ring")
        times.append((time.perf_counter() - start) / 3)
    return times[0], times[1]


def test_an_injected_delay_is_there() -> None:
    for fast, slow in on_ranks(slow_wire, 3):
        assert slow >= 4 * 0.02 > fast
