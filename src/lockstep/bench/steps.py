"""Steps of a strategy on a part of the ranks: how they are prepared, what memory they need, how one is timed."""

import time
from dataclasses import replace
from itertools import cycle, islice

import torch
import torch.distributed as dist
from torch import nn

from lockstep.bench.memory import Memory, measure_memory
from lockstep.comm.hosts import hosts_meet
from lockstep.config import Config
from lockstep.data import Batch, DataSet, DataSpec, Sampler, read_share
from lockstep.errors import UserError
from lockstep.models import build_model
from lockstep.strategies import StepResult, Strategy, strategy_named
from lockstep.strategies.step import COMPUTE_DTYPES, DTYPES
from lockstep.strategies.theory import Theory, expected_traffic
from lockstep.training.prepare import prepare_strategy
from lockstep.world import World, check_backend, torch_backend

MEMORY_STEPS = 3
"""Steps of each case under the watch of memory, before the others: DDP regroups its buckets after the first."""


def part_of(world: World, ranks: int | None = None, backend: str = "") -> World | None:
    """The first `ranks` ranks as a world of their own, perhaps joined by another backend; None on the others.

    Every rank must call it.
    """
    ranks = world.size if ranks is None else ranks
    if ranks > world.size:
        raise UserError(f"{ranks} ranks are asked for, and {world.size} have been started")
    same_backend = backend in ("", world.backend)
    if world.size == 1 or (ranks == world.size and same_backend):
        return world
    chosen = backend or world.backend
    check_backend(chosen, world.device, "--strategies: the backend")
    group = dist.new_group(list(range(ranks)), backend=torch_backend(chosen))
    if world.rank >= ranks:
        return None
    return replace(world, size=ranks, backend=chosen, group=group, ranks_on_device=sharing(world, ranks))


def sharing(world: World, ranks: int) -> int:
    """How many of the first `ranks` ranks have one device, at most: ranks take the devices in turn."""
    devices = -(-world.size // world.ranks_on_device)
    return -(-ranks // devices)


def full_batches(config: Config, dataset: DataSet) -> list[torch.Tensor]:
    """Indices of an epoch's global batches, the short last one left out if there is another."""
    sampler = Sampler(len(dataset.train), config.train.batch_size, config.train.seed)
    batches = list(sampler.epoch(0))
    return [indices for indices in batches if len(indices) == config.train.batch_size] or batches


def meeting_cycle(config: Config) -> int:
    """After how many steps all have happened that happens in steps."""
    return config.parallel.sync_every if config.parallel.data == "local_sgd" else 1


def memory_of_steps(
    world: World, config: Config, name: str, dataset: DataSet, plain: nn.Module | None = None
) -> Memory:
    """What a few steps need on this rank."""
    batches, steps = full_batches(config, dataset), max(MEMORY_STEPS, meeting_cycle(named_config(config, name)))
    with measure_memory(world.device) as watch:
        strategy = prepare_named(world, config, name, dataset, plain)
        watch.steps_begin()
        for indices in islice(cycle(batches), steps):
            strategy.step(read_share(dataset.train, indices, strategy.batch_share())).totals.pending.wait()
        watch.steps_end(strategy)
    return watch.memory


def timed_step(world: World, strategy: Strategy, batch: Batch) -> tuple[float, StepResult]:
    """Seconds from a common start to the end of the device's work, and what the step gave."""
    if world.device.type == "cpu" and torch.get_num_threads() > 1:
        spread_threads()
    meet(world)
    start = time.perf_counter()
    result = strategy.step(batch)
    _synchronize(world)
    return time.perf_counter() - start, result


def spread_threads(seconds: float = 0.01) -> None:
    """Keep this process's threads busy until the system has given each a core of its own.

    They slept while others had their turn. Woken together, two may begin on one core, and take turns there for some
    ticks of the system's clock: as long as a whole step of a small model.
    """
    numbers, end = torch.ones(2**18), time.perf_counter() + seconds
    while time.perf_counter() < end:
        numbers.add_(1)


def meet(world: World) -> None:
    """All ranks begin together, with nothing left to do on the device."""
    _synchronize(world)
    if world.size > 1:  # else it is one of several ranks that trains alone
        hosts_meet(world.device)


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def prepare_named(
    world: World, config: Config, name: str, dataset: DataSet, plain: nn.Module | None = None
) -> Strategy:
    return prepare_strategy(world, named_config(config, name), dataset, plain)


def named_config(config: Config, name: str) -> Config:
    """`config` with the strategy of that name, a backend after an @ left out."""
    return replace(config, parallel=strategy_named(name.partition("@")[0], config.parallel))


def theory_of(config: Config, spec: DataSpec, ranks: int) -> Theory | None:
    """What a step that is taken should send, where there is a closed form.

    There is none with adapters, recomputation, running statistics, or gradients that several micro-batches send.
    """
    train, sharded = config.train, config.parallel.data in ("zero2", "zero3", "fsdp")
    if config.lora.rank or train.recompute != "none":
        return None
    if config.parallel.data in ("local_sgd", "deepspeed") or (train.accumulation > 1 and sharded):
        return None
    with torch.device("meta"):
        model = build_model(config.model, spec).to(DTYPES[train.precision])
    if any(True for _ in model.buffers()):
        return None  # running statistics travel too
    return expected_traffic(model, config.parallel, ranks, COMPUTE_DTYPES.get(train.precision))
