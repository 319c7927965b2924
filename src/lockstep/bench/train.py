"""Training steps of several strategies, taken in turns in one run, so that a noisy machine disturbs all alike."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median, quantiles

import torch
import torch.distributed as dist

from lockstep.bench.memory import measure_peak
from lockstep.comm.collectives import all_gather_objects, barrier
from lockstep.comm.ledger import Ledger, Traffic
from lockstep.config import Config, check_ranges
from lockstep.data import Batch, DataSet, Sampler, read_share
from lockstep.strategies import Strategy, strategy_named
from lockstep.training import prepare_strategy
from lockstep.training.prepare import load_data
from lockstep.world import World, check_backend

Progress = Callable[[], None]


@dataclass
class Timing:
    """What one strategy's steps cost."""

    strategy: str
    parameters: int
    batch_size: int
    flops_per_step: float
    """Of the whole global batch."""
    peak_mib: float
    """Tensors held at once by one rank."""
    step_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)

    def record(self, seconds: float, ledger: Ledger) -> None:
        """Note one step."""
        self.step_s.append(seconds)
        self.exposed_s.append(ledger.exposed_seconds())
        self.traffic.append(ledger.traffic())

    @property
    def median_ms(self) -> float:
        return 1e3 * median(self.step_s)

    @property
    def spread_ms(self) -> tuple[float, float]:
        """10th and 90th percentile."""
        tenths = quantiles(self.step_s, n=10) if len(self.step_s) > 1 else [self.step_s[0]] * 9
        return 1e3 * tenths[0], 1e3 * tenths[-1]

    @property
    def samples_per_s(self) -> float:
        return self.batch_size / median(self.step_s)

    @property
    def exposed_share(self) -> float:
        return median(self.exposed_s) / median(self.step_s)

    @property
    def collectives(self) -> float:
        """Per step, on average: local SGD sends something in some steps only."""
        return sum(t.collectives for t in self.traffic) / len(self.traffic)

    @property
    def wire_mb(self) -> float:
        """MB that a rank sends per step, on average."""
        return sum(t.wire_bytes for t in self.traffic) / len(self.traffic) / 1e6

    def ratio_to(self, other: "Timing") -> float:
        """Median over the rounds of this step's time over the other's in the same round."""
        return median(mine / theirs for mine, theirs in zip(self.step_s, other.step_s, strict=True))


def bench_train(
    world: World, config: Config, names: list[str], steps: int, warmup: int, progress: Progress | None = None
) -> list[Timing]:
    """Time `steps` steps of each strategy after `warmup` untimed ones. A step counts as long as its slowest rank."""
    check_ranges(config)
    dataset = load_data(world, config)
    worlds = {n: world_of(world, n) for n in names}
    peaks = {n: peak_memory(worlds[n], config, n, dataset) for n in names}
    strategies = {n: prepare_named(worlds[n], config, n, dataset) for n in names}
    timings = {n: new_timing(n, strategy, config, peaks[n]) for n, strategy in strategies.items()}
    sampler = Sampler(len(dataset.train), config.train.batch_size, config.train.seed)
    batches = [indices for indices in sampler.epoch(0) if len(indices) == config.train.batch_size]
    batches = batches or list(sampler.epoch(0))
    for round_ in range(warmup + steps):
        indices = batches[round_ % len(batches)]
        turn = names[round_ % len(names) :] + names[: round_ % len(names)]
        for name in turn:
            strategy = strategies[name]
            batch = read_share(dataset.train, indices, strategy.batch_share())
            seconds = timed_step(world, strategy, batch)
            if round_ >= warmup:
                timings[name].record(seconds, strategy.ledger)
        if progress is not None:
            progress()
    return [slowest_rank(t) for t in timings.values()]


def peak_memory(world: World, config: Config, name: str, dataset: DataSet, steps: int = 3) -> float:
    """Peak MiB of tensors on this rank, from building the model through a few steps (DDP regroups after the first)."""
    sampler = Sampler(len(dataset.train), config.train.batch_size, config.train.seed)
    with measure_peak(world.device) as peak:
        strategy = prepare_named(world, config, name, dataset)
        for indices in islice(sampler.epoch(0), steps):
            strategy.step(read_share(dataset.train, indices, strategy.batch_share())).totals.pending.wait()
    return peak.mib


def timed_step(world: World, strategy: Strategy, batch: Batch) -> float:
    """Seconds from a common start to the end of the device's work."""
    if world.size > 1:
        barrier()
    _synchronize(world)
    start = time.perf_counter()
    strategy.step(batch)
    _synchronize(world)
    return time.perf_counter() - start


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def world_of(world: World, name: str) -> World:
    """`ddp@gloo`: the same ranks, joined by another backend than the run's."""
    backend = name.partition("@")[2]
    if not backend or backend == world.backend or world.size == 1:
        return world
    check_backend(backend, world.device, "--strategies @")
    return replace(world, backend=backend, group=dist.new_group(backend=backend))


def prepare_named(world: World, config: Config, name: str, dataset: DataSet) -> Strategy:
    parallel = strategy_named(name.partition("@")[0], config.parallel)
    return prepare_strategy(world, replace(config, parallel=parallel), dataset)


def new_timing(name: str, strategy: Strategy, config: Config, peak_mib: float) -> Timing:
    batch = config.train.batch_size
    return Timing(name, strategy.parameters, batch, batch * strategy.flops_per_sample, peak_mib)


def slowest_rank(mine: Timing) -> Timing:
    """Per step, the time of the rank that took longest; exposed communication as the mean over the ranks."""
    everyone: list[Timing] = all_gather_objects(mine)
    merged = replace(mine, peak_mib=max(t.peak_mib for t in everyone))
    merged.step_s = [max(times) for times in zip(*(t.step_s for t in everyone), strict=True)]
    merged.exposed_s = [sum(times) / len(everyone) for times in zip(*(t.exposed_s for t in everyone), strict=True)]
    return merged
