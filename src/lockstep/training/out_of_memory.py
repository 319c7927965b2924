"""Out of memory, as one line: which rank, what it held, and what would help how much."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.strategies import STRATEGIES, ParallelModel

GIB = 2**30
RAN_OUT = "ran out of memory"
PARTS = ("parameters", "gradients", "optimizer state")


def is_out_of_memory(error: BaseException) -> bool:
    """The GPU's allocator, the CPU's, or Python's own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def out_of_memory_in_one_line(strategy: ParallelModel, config: Config) -> Iterator[None]:
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
    advice = "; ".join(what_helps(config, strategy, activations, (parameters, gradients, optimizer)))
    return f"rank {world.rank} {RAN_OUT} {place}: it held {held}. What helps: {advice}"


def what_helps(
    config: Config, strategy: ParallelModel, activations: float, held: tuple[float, float, float]
) -> list[str]:
    """Flags, each with what it would save where that can be computed. `held`: parameters, gradients and optimizer
    state.
    """
    train, parallel, ranks = config.train, config.parallel, strategy.layout.batch.size
    found = []
    if train.batch_size // max(1, ranks * train.accumulation) > 1:
        saves = f" (saves about {words(activations / 2)})" if activations else ""
        found.append(f"--train.accumulation {2 * train.accumulation}, half the micro-batch{saves}")
    if train.recompute != "full":
        found.append("--train.recompute full, which keeps of each block only its input")
    facts = type(strategy.engine).facts(parallel)
    if ranks > 1 and facts.smaller is not None:
        next_facts = STRATEGIES[facts.smaller].facts(replace(parallel, data=facts.smaller))
        more = [not here and there for here, there in zip(facts.divides, next_facts.divides, strict=True)]
        what = next(name for name, divided in zip(PARTS, more, strict=True) if divided)
        saved = held[more.index(True)] * (ranks - 1) / ranks  # of optimizer state: none before the first update
        saves = f" (saves {words(saved)} of {what})" if saved else ""
        found.append(f"--parallel.data {facts.smaller}{saves}")
    elif parallel.offload == "none" and "cpu" in type(strategy.engine).offloads:
        found.append(f"--parallel.offload cpu (saves {words(held[2])} of optimizer state)")
    found.append("lockstep plan CONFIG shows which layouts fit")
    return found


def words(amount: float) -> str:
    return f"{amount / GIB:.2f} GiB"
