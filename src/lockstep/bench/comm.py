"""What does an interconnect give? Collectives over a range of sizes, in the terms of nccl-tests.

    size     S: bytes of the whole array that the collective is about; for all_gather the gathered one
    algbw    S / time, in 1e9 B/s
    busbw    algbw times a factor that makes collectives and numbers of ranks comparable with the speed of a link:
             what each rank must send at least, per byte of S

Candidates (backends, algorithms) are measured in turns at each size, so that a noisy machine disturbs all alike.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, quantiles

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import collectives
from lockstep.comm.algorithms import ALGORITHMS, ring_all_gather, ring_reduce_scatter, tree_broadcast
from lockstep.comm.by_hand import all_reduce_over
from lockstep.comm.collectives import Group, all_gather_objects
from lockstep.comm.ledger import Mark, mark, seconds_between, wire_factor
from lockstep.comm.reduction import reduction
from lockstep.comm.wire import Wire
from lockstep.errors import UserError
from lockstep.world import World, check_backend

DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("broadcast", "reduce", "gather", "scatter", "send_recv"),
)
BY_HAND = {  # besides native
    "all_reduce": (*ALGORITHMS, "hierarchical", "auto"),
    "reduce_scatter": ("ring",),
    "all_gather": ("ring",),
    "broadcast": ("tree",),
}
ROUNDS = 4
"""Candidates take turns this often per size."""


@dataclass(frozen=True)
class Sweep:
    """What to measure at each size."""

    sizes: tuple[int, ...]
    iterations: int = 20
    warmup: int = 5
    check: bool = True
    dtype: str = "float"
    op: str = "sum"
    delay: float = 0.0
    """Seconds by which the wire holds back every message of the algorithms by hand: a check of the benchmark itself."""


@dataclass(frozen=True)
class Candidate:
    """Who performs a collective."""

    backend: str
    algorithm: str = "native"

    @property
    def name(self) -> str:
        return self.backend if self.algorithm == "native" else f"{self.backend} {self.algorithm}"


@dataclass
class Row:
    """One collective at one size, by one candidate."""

    collective: str
    candidate: Candidate
    ranks: int
    nbytes: int
    count: int
    """Elements of the whole array."""
    dtype: str
    op: str
    seconds: list[list[float]] = field(default_factory=list)
    """Of each rank, of each iteration."""
    wrong: int | None = None
    """Elements that were not what arithmetic says, on all ranks; None: not checked."""

    @property
    def slowest(self) -> list[float]:
        """Of each iteration, the time of the rank that took longest."""
        return [max(times) for times in zip(*self.seconds, strict=True)]

    @property
    def time(self) -> float:
        """Mean over iterations and ranks, as nccl-tests has it."""
        return fmean(t for rank in self.seconds for t in rank)

    @property
    def p50(self) -> float:
        return percentile(self.slowest, 50)

    @property
    def p99(self) -> float:
        return percentile(self.slowest, 99)

    @property
    def max(self) -> float:
        return max(self.slowest)

    @property
    def slow_rank(self) -> int:
        """The rank whose mean is longest."""
        means = [fmean(times) for times in self.seconds]
        return means.index(max(means))

    @property
    def algbw(self) -> float:
        return self.nbytes / self.time / 1e9

    @property
    def busbw(self) -> float:
        return self.algbw * bus_factor(self.collective, self.ranks)


def percentile(values: list[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def bus_factor(collective: str, ranks: int) -> float:
    return wire_factor("send" if collective == "send_recv" else collective, ranks) if ranks > 1 else 1.0


# ---- one collective -----------------------------------------------------------------------------------------


class Trial:
    """The buffers of one collective at one size, how to perform it, and what it should give."""

    def __init__(self, collective: str, world: World, nbytes: int, sweep: Sweep, candidate: Candidate, group: Group):
        self.collective, self.sweep, self.candidate, self.group = collective, sweep, candidate, group
        self.rank, self.size = world.rank, world.size
        dtype = DTYPES[sweep.dtype]
        in_parts = collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
        parts = self.size if in_parts else 1
        self.part = max(1, nbytes // dtype.itemsize // parts)
        self.count = self.part * parts
        self.input = torch.empty(self.count, dtype=dtype, device=world.device)
        self.output = torch.empty(self.count, dtype=dtype, device=world.device)
        self.wire = Wire(group, delay=sweep.delay)
        self.op = OPS[sweep.op]
        self.input.zero_()
        self.output.zero_()
        native = candidate.algorithm == "native"
        self.run = self._native() if native else self._by_hand(candidate.algorithm)
        """Performs it once; synchronous (on a GPU: to the stream)."""

    def _native(self) -> Callable[[], object]:
        """All but the collective itself is done here, out of the timed part."""
        whole, out, op, group = self.input, self.output, self.op, self.group
        inputs, outputs, first = list(whole.split(self.part)), list(out.split(self.part)), out[: self.part]
        mine, is_root = inputs[self.rank % len(inputs)], self.rank == 0
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        table: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, op=op, group=group),
            "all_gather": lambda: collectives._all_gather_single(out, mine, group=group),
            "reduce_scatter": lambda: collectives._reduce_scatter_single(first, whole, op=op, group=group),
            "all_to_all": lambda: dist.all_to_all_single(out, whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, group_src=0, group=group),
            "reduce": lambda: dist.reduce(whole, group_dst=0, op=op, group=group),
            "gather": lambda: dist.gather(mine, outputs if is_root else None, group_dst=0, group=group),
            "scatter": lambda: dist.scatter(first, inputs if is_root else None, group_src=0, group=group),
            "send_recv": lambda: self.wire.exchange([(whole, right)], [(out, left)]).wait(),
        }
        return table[self.collective]

    def _by_hand(self, algorithm: str) -> Callable[[], object]:
        inputs, outputs = self.input.split(self.part), self.output.split(self.part)
        combine, average = reduction(self.op, self.input.dtype)

        def reduce_scatter() -> None:
            outputs[0].copy_(ring_reduce_scatter(self.wire, inputs, combine))
            if average:
                outputs[0].div_(self.size)

        def all_gather() -> None:
            outputs[self.rank].copy_(inputs[self.rank])
            ring_all_gather(self.wire, outputs)

        table: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: all_reduce_over(self.wire, self.input, algorithm, self.op),
            "reduce_scatter": reduce_scatter,
            "all_gather": all_gather,
            "broadcast": lambda: tree_broadcast(self.wire, self.input),
        }
        return table[self.collective]

    # ---- is it right?

    def wrong(self) -> int:
        """Elements on this rank that differ from what arithmetic says, after one untimed run on known numbers.

        The numbers are so small that every sum is exact in every dtype and in every order.
        """
        self.input.copy_(self._numbers(self.rank))
        self.output.zero_()
        self.run()
        got, expected = self._expected()
        differ = int((got != expected).sum()) if got is not None else 0
        self.input.zero_()
        return differ

    def _numbers(self, rank: int) -> Tensor:
        """1 or 2 in every place, depending on the rank."""
        return ((torch.arange(self.count, device=self.input.device) + rank) % 2 + 1).to(self.input.dtype)

    def _reduced(self) -> Tensor:
        """The reduction of all ranks' numbers, which take two values only: exact in float64, whatever the op."""
        everyone = torch.stack([self._numbers(r)[:2].double() for r in range(self.size)])
        match self.sweep.op:
            case "sum":
                pattern = everyone.sum(0)
            case "avg":
                pattern = everyone.mean(0)
            case "prod":
                pattern = everyone.prod(0)
            case "max":
                pattern = everyone.amax(0)
            case _:
                pattern = everyone.amin(0)
        repeats = -(-self.count // len(pattern))
        return pattern.repeat(repeats)[: self.count].to(self.input.dtype)

    def _expected(self) -> tuple[Tensor | None, Tensor]:
        """(what came out, what should have); None where this rank gets nothing."""
        part, mine = self.part, slice(self.rank * self.part, (self.rank + 1) * self.part)
        match self.collective:
            case "all_reduce":
                return self.input, self._reduced()
            case "reduce":
                return (self.input if self.rank == 0 else None), self._reduced()
            case "reduce_scatter":
                return self.output[:part], self._reduced()[mine]
            case "broadcast":
                return self.input, self._numbers(0)
            case "all_gather" | "gather":
                whole = torch.cat([self._numbers(r)[r * part : (r + 1) * part] for r in range(self.size)])
                return (self.output if self.collective == "all_gather" or self.rank == 0 else None), whole
            case "scatter":
                return self.output[:part], self._numbers(0)[mine]
            case "all_to_all":
                return self.output, torch.cat([self._numbers(r)[mine] for r in range(self.size)])
            case _:
                return self.output, self._numbers((self.rank - 1) % self.size)


# ---- the sweep ----------------------------------------------------------------------------------------------


def candidates_for(collective: str, backends: list[str], algorithms: list[str]) -> list[Candidate]:
    """Every backend natively, and the first one by the algorithms by hand that there are for this collective."""
    names = (*BY_HAND.get(collective, ()),) if "all" in algorithms else algorithms
    chosen = [n for n in names if n in BY_HAND.get(collective, ()) and not (n == "auto" and "all" in algorithms)]
    native = [Candidate(b) for b in backends] if "native" in algorithms or "all" in algorithms else []
    return native + [Candidate(backends[0], name) for name in chosen]


def bench_comm(
    world: World,
    names: list[str],
    backends: list[str],
    algorithms: list[str],
    sweep: Sweep,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure each collective by each candidate at each size; every rank returns the same rows."""
    if world.size < 2:
        raise UserError("bench comm measures what goes between ranks: it needs --nproc 2 or more")
    groups = make_groups(world, backends)
    rows = []
    for collective in names:
        candidates = candidates_for(collective, backends, algorithms)
        for nbytes in sweep.sizes:
            progress(f"{collective} {nbytes:,} B")
            trials = [Trial(collective, world, nbytes, sweep, c, groups[c.backend]) for c in candidates]
            rows += _measure(world, trials, sweep)
    return rows


def make_groups(world: World, backends: list[str]) -> dict[str, Group]:
    for backend in backends:
        check_backend(backend, world.device)
    groups = {b: None if b == world.backend else dist.new_group(backend=b) for b in backends}
    for group in groups.values():
        dist.barrier(group=group)  # NCCL's first call must be everybody's, not a pair's
    return groups


def _measure(world: World, trials: list[Trial], sweep: Sweep) -> list[Row]:
    rows = []
    for trial in trials:
        nbytes = trial.count * trial.input.itemsize
        op = sweep.op if trial.collective in REDUCING else "none"
        rows.append(Row(trial.collective, trial.candidate, world.size, nbytes, trial.count, sweep.dtype, op))
        for _ in range(sweep.warmup):
            trial.run()
    times: list[list[float]] = [[] for _ in trials]
    for share in _shares(sweep.iterations, ROUNDS):
        for trial, own in zip(trials, times, strict=True):
            own += _time(world, trial, share)
    for row, trial, own in zip(rows, trials, times, strict=True):
        everyone = all_gather_objects((own, trial.wrong() if sweep.check else None))
        row.seconds = [seconds for seconds, _ in everyone]
        row.wrong = sum(wrong for _, wrong in everyone) if sweep.check else None
    return rows


def _shares(total: int, rounds: int) -> Iterator[int]:
    for number in range(rounds):
        share = total * (number + 1) // rounds - total * number // rounds
        if share:
            yield share


def _time(world: World, trial: Trial, iterations: int) -> list[float]:
    """Seconds of each of some iterations, back to back after a barrier."""
    dist.barrier(group=trial.group)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    marks: list[Mark] = [mark(world.device)]
    for _ in range(iterations):
        trial.run()
        marks.append(mark(world.device))
    return [seconds_between(a, b) for a, b in pairwise(marks)]


# ---- pairs of ranks -----------------------------------------------------------------------------------------

PING_BYTES, STREAM_BYTES = 8, 4 * 1024 * 1024


@dataclass
class Pairs:
    """Between each two ranks, one pair at a time: [from][to]."""

    latency: list[list[float]]
    """Seconds of a message of 8 bytes: half a round trip, the median."""
    bandwidth: list[list[float]]
    """Bytes per second of messages of 4 MiB, one way and back: the median."""


def bench_pairs(
    world: World, backend: str, iterations: int = 20, progress: Callable[[str], None] = lambda _: None
) -> Pairs:
    """Ping-pong between each pair of ranks, while the others wait."""
    if world.size < 2:
        raise UserError("bench comm measures what goes between ranks: it needs --nproc 2 or more")
    group = make_groups(world, [backend])[backend]
    wire = Wire(group)
    latency = [[0.0] * world.size for _ in range(world.size)]
    bandwidth = [[0.0] * world.size for _ in range(world.size)]
    for a in range(world.size):
        for b in range(a + 1, world.size):
            progress(f"pair {a} - {b}")
            mine: tuple[float, float] | None = None
            if world.rank in (a, b):
                other = b if world.rank == a else a
                small = _ping_pong(world, wire, other, PING_BYTES, 5 * iterations)
                mine = small, STREAM_BYTES / _ping_pong(world, wire, other, STREAM_BYTES, iterations)
            seen = next(found for found in all_gather_objects(mine) if found is not None)
            latency[a][b] = latency[b][a] = seen[0]
            bandwidth[a][b] = bandwidth[b][a] = seen[1]
    return Pairs(latency, bandwidth)


def _ping_pong(world: World, wire: Wire, other: int, nbytes: int, iterations: int) -> float:
    """Half a round trip, in seconds."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
    times = []
    for _ in range(iterations + 2):
        start = time.perf_counter()
        if world.rank < other:
            wire.send(tensor, other)
            wire.receive(tensor, other)
        else:
            wire.receive(tensor, other)
            wire.send(tensor, other)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append((time.perf_counter() - start) / 2)
    return percentile(times[2:], 50)
