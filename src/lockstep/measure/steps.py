"""Steps of a strategy: what memory they need, and how one is timed."""

import time
from collections.abc import Callable, Iterable

import torch

from lockstep.comm.hosts import hosts_meet
from lockstep.config import Config
from lockstep.data import Batch, DataSet, Sampler
from lockstep.layout.world import World
from lockstep.measure.memory import Memory, measure_memory
from lockstep.strategies import ParallelModel, StepResult

MEMORY_STEPS = 3
"""Steps of each case under the watch of memory, before the others: DDP regroups its buckets after the first."""


def full_batches(config: Config, dataset: DataSet) -> list[torch.Tensor]:
    """Indices of an epoch's global batches, the short last one left out if there is another."""
    sampler = Sampler(len(dataset.train), config.train.batch_size, config.train.seed)
    batches = list(sampler.epoch(0))
    return [indices for indices in batches if len(indices) == config.train.batch_size] or batches


def memory_of_steps(
    device: torch.device,
    prepare: Callable[[], ParallelModel],
    batches: Callable[[ParallelModel], Iterable[Batch]],
) -> Memory:
    """What a few steps need on this rank: those of what `prepare()` gives, on its share of some batches."""
    with measure_memory(device) as watch:
        strategy = prepare()
        watch.steps_begin()
        for batch in batches(strategy):
            strategy.step(batch).totals.pending.wait()
        strategy.settle()
        watch.steps_end(strategy)
    return watch.memory


def timed_step(world: World, strategy: ParallelModel, batch: Batch, lead_in: bool = False) -> tuple[float, StepResult]:
    """Seconds of a step, and what it gave.

    They last from a common start to the end of the device's work. `lead_in`: another step is taken first, and the clock
    runs from its end: what a step leaves in flight (zero1's and zero2's all-gathers) is then paid for by the next one,
    as it is in training. What the timed one leaves is waited for after the clock has stopped.
    """
    if world.device.type == "cpu" and torch.get_num_threads() > 1:
        spread_threads()
    synchronize(world)
    if lead_in:
        strategy.step(batch)
        _computed(world)
    start = time.perf_counter()
    result = strategy.step(batch)
    _computed(world)
    seconds = time.perf_counter() - start
    strategy.settle()
    return seconds, result


def spread_threads(seconds: float = 0.01) -> None:
    """Keep this process's threads busy until the system has given each a core of its own.

    They slept while others had their turn. Woken together, two may begin on one core, and take turns there for some
    ticks of the system's clock: as long as a whole step of a small model.
    """
    numbers, end = torch.ones(2**18), time.perf_counter() + seconds
    while time.perf_counter() < end:
        numbers.add_(1)


def synchronize(world: World) -> None:
    """All ranks begin together, with nothing left to do on the device."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    if world.size > 1:  # else it is one of several ranks that trains alone
        hosts_meet(world.device)


def _computed(world: World) -> None:
    """Wait for the stream that computes; what communication has left in flight goes on."""
    if world.device.type == "cuda":
        torch.cuda.current_stream(world.device).synchronize()
