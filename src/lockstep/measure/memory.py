"""Memory of one piece of work, in tensor bytes: from the CUDA allocator, or from the profiler on the CPU.

The resident set of a CPU process says little here: it holds libraries, and freed memory that malloc keeps. The
profiler sees each tensor's allocation and release, so its count is exact and the same in every run.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import profile, record_function

from lockstep.comm.shm.shared import held_bytes
from lockstep.intervals import covered
from lockstep.layout.region import local
from lockstep.measure.profiler import profiler_for, trace_of
from lockstep.strategies import ParallelModel

MIB = 1024 * 1024
STEPS_BEGIN = "lockstep: steps begin"


@dataclass
class Memory:
    """MiB of tensors on one rank: at the peak of its steps, and what of it is there between steps."""

    peak_mib: float = float("nan")
    held_mib: float = float("nan")
    """After a step, before its gradients are dropped."""
    parameters_mib: float = 0.0
    gradients_mib: float = 0.0
    optimizer_mib: float = 0.0

    @property
    def activations_mib(self) -> float:
        """What comes and goes within a step: activations, gathered parameters, temporaries."""
        return max(0.0, self.peak_mib - self.held_mib)

    @property
    def other_mib(self) -> float:
        """Held, but none of those: buckets, buffers of the model, the batch."""
        return max(0.0, self.held_mib - self.parameters_mib - self.gradients_mib - self.optimizer_mib)


class Watch:
    """Inside `measure_memory`: the work marks where its steps begin, and what it holds when they are over."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory = device, Memory()

    def steps_begin(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with record_function(STEPS_BEGIN):
            pass

    def steps_end(self, strategy: ParallelModel) -> None:
        parts = held_parts(strategy)
        self.memory.parameters_mib, self.memory.gradients_mib, self.memory.optimizer_mib = (p / MIB for p in parts)


@contextmanager
def measure_memory(device: torch.device) -> Iterator[Watch]:
    """Of what the block allocates. Slows the block down."""
    watch = Watch(device)
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        yield watch
        watch.memory.peak_mib = (torch.cuda.max_memory_allocated(device) - before) / MIB
        watch.memory.held_mib = (torch.cuda.memory_allocated(device) - before) / MIB
        return
    shared_before = held_bytes()
    with profiler_for(device, profile_memory=True) as profiler:
        yield watch
        shared = max(0, held_bytes() - shared_before)  # tensors in shared memory stay as long as what uses them
    peak, held = _peak_and_held(profiler)
    watch.memory.peak_mib, watch.memory.held_mib = (peak + shared) / MIB, (held + shared) / MIB


def _peak_and_held(profiler: profile) -> tuple[int, int]:
    """Bytes at most since the steps began, and at the end."""
    events = trace_of(profiler)["traceEvents"]
    begin = next((e["ts"] for e in events if e.get("name") == STEPS_BEGIN), 0.0)
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    held = peak = 0
    for when, change in sorted(changes, key=lambda c: c[0]):
        held += change
        if when >= begin:
            peak = max(peak, held)
    return peak, held


def held_parts(strategy: ParallelModel) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state on this rank's device; what is shared counts once."""
    engine = strategy.engine
    states = engine.local_optimizer.state.values()
    state = [value for values in states for value in values.values() if isinstance(value, Tensor)]
    seen: list[tuple[int, int]] = []
    parts = []
    gradients = [*engine.gradient_memory(), *strategy.worker.gradients.tensors()]
    for tensors in (strategy.model.parameters(), gradients, state):
        before = covered(seen)
        seen += _places(tensors, strategy.world.device)
        parts.append(covered(seen) - before)
    return parts[0], parts[1], parts[2]


def _places(tensors: Iterable[Tensor], device: torch.device) -> list[tuple[int, int]]:
    """First and last address of each."""
    here = [tensor for tensor in map(local, tensors) if tensor.device == device and tensor.numel()]
    return [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in here]
