"""What does an interconnect give? Collectives over a range of sizes, in the terms of nccl-tests.

    size     S: bytes of the whole array that the collective is about; for all_gather the gathered one
    algbw    S / time, in 1e9 B/s
    busbw    algbw times a factor that makes collectives and numbers of ranks comparable with the speed of a link:
             what each rank must send at least, per byte of S

Candidates (backends, algorithms) are measured in turns at each size, so that a noisy machine disturbs all alike.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, quantiles

import torch
import torch.distributed as dist

from lockstep.bench.trial import BY_HAND, REDUCING, Candidate, Sweep, Trial
from lockstep.comm.collectives import all_gather_objects, barrier
from lockstep.comm.ledger import Mark, mark, seconds_between, wire_factor
from lockstep.errors import UserError
from lockstep.launch.join import check_backend
from lockstep.layout.world import World

ROUNDS = 4
"""Candidates take turns this often per size."""


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
    so_far: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Measure each collective by each candidate at each size; every rank returns the same rows.

    `so_far` is called with the rows that there are after each size.
    """
    if world.size < 2:
        raise UserError("bench comm measures what goes between ranks: it needs --nproc 2 or more")
    groups = make_groups(world, backends)
    rows: list[Row] = []
    for collective in names:
        candidates = candidates_for(collective, backends, algorithms)
        for nbytes in sweep.sizes:
            progress(f"{collective} {nbytes:,} B")
            trials = [Trial(collective, world, nbytes, sweep, c, groups[c.backend]) for c in candidates]
            rows += _measure(world, trials, sweep)
            so_far(rows)
    return rows


def make_groups(world: World, backends: list[str]) -> dict[str, dist.ProcessGroup | None]:
    for backend in backends:
        check_backend(backend, world.device, "--against")
    groups = {b: None if b == world.backend else dist.new_group(backend=b) for b in backends}
    for group in groups.values():
        barrier(group)  # NCCL's first call must be of all ranks, not of a pair
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
    barrier(trial.group)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    marks: list[Mark] = [mark(world.device)]
    for _ in range(iterations):
        trial.run()
        marks.append(mark(world.device))
    return [seconds_between(a, b) for a, b in pairwise(marks)]
