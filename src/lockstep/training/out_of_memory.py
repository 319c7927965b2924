"""Out of memory, as one line: which rank, what it held, and what would help how much."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.strategies import ParallelModel

GIB = 2**30
RAN_OUT = "ran out of memory"
SHARDED = {"ddp": "zero1", "bucketed": "zero1", "overlap": "zero1", "flat": "zero1", "naive": "zero1"}
FURTHER = {"zero1": "zero2", "zero2": "zero3", "zero1_torch": "zero2"}


def is_out_of_memory(error: BaseException) -> bool:
    """The GPU's allocator, the CPU's, or Python's own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def told_in_one_line(strategy: ParallelModel, config: Config) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(explained(strategy, config)) from error


def explained(strategy: ParallelModel, config: Config) -> str:
    from lockstep.measure.memory import held_parts  # the profiler, which takes long to import

    world = strategy.world
    parameters, gradients, optimizer = held_parts(strategy)
    held = f"parameters {words(parameters)}, gradients {words(gradients)}, optimizer state {words(optimizer)}"
    activations = 0.0
    place = "on this machine"
    if world.device.type == "cuda":
        activations = max(0.0, torch.cuda.max_memory_allocated(world.device) - parameters - gradients - optimizer)
        total = torch.cuda.get_device_properties(world.device).total_memory
        place = f"on {torch.cuda.get_device_name(world.device)} ({words(total)})"
        held += f", activations and the rest {words(activations)}"
    advice = "; ".join(what_helps(config, strategy, activations, gradients, optimizer))
    return f"rank {world.rank} {RAN_OUT} {place}: it held {held}. What helps: {advice}"


def what_helps(
    config: Config, strategy: ParallelModel, activations: float, gradients: float, optimizer: float
) -> list[str]:
    """Flags, each with what it would save where that can be computed."""
    train, parallel, ranks = config.train, config.parallel, strategy.layout.batch.size
    found = []
    if train.batch_size // max(1, ranks * train.accumulation) > 1:
        saves = f" (saves about {words(activations / 2)})" if activations else ""
        found.append(f"--train.accumulation {2 * train.accumulation}, half the micro-batch{saves}")
    if train.recompute != "full":
        found.append("--train.recompute full, which keeps of each block only its input")
    if ranks > 1 and parallel.data in SHARDED:
        saved = optimizer * (ranks - 1) / ranks  # none before the first update
        saves = f" (saves {words(saved)} of optimizer state)" if saved else ""
        found.append(f"--parallel.data {SHARDED[parallel.data]}{saves}")
    elif ranks > 1 and parallel.data in FURTHER:
        saved = gradients * (ranks - 1) / ranks
        found.append(f"--parallel.data {FURTHER[parallel.data]} (saves {words(saved)} of gradients)")
    elif parallel.offload == "none" and parallel.data in ("zero3", "fsdp", "deepspeed"):
        found.append(f"--parallel.offload cpu (saves {words(optimizer)} of optimizer state)")
    found.append("lockstep plan CONFIG shows which layouts fit")
    return found


def words(amount: float) -> str:
    return f"{amount / GIB:.2f} GiB"
