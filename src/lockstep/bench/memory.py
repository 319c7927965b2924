"""Peak memory of one piece of work, in tensor bytes: from the CUDA allocator, or from the profiler on the CPU.

The resident set of a CPU process says little here: it holds libraries, and freed memory that malloc keeps. The
profiler sees each tensor's allocation and release, so its count is exact and the same in every run.
"""

import gc
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lockstep.comm.shm.shared import held_bytes

MIB = 1024 * 1024


class PeakMemory:
    """Filled in when the `measure_peak` block ends."""

    mib: float = float("nan")


@contextmanager
def measure_peak(device: torch.device) -> Iterator[PeakMemory]:
    """Peak MiB of tensors that the block held at once, without what was there before it. Slows the block down."""
    result = PeakMemory()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield result
        result.mib = (torch.cuda.max_memory_allocated(device) - before) / MIB
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces its start on stderr
    shared_before = held_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield result
        shared = held_bytes() - shared_before  # tensors in shared memory stay as long as what uses them
    result.mib = (_peak_of(profiler) + max(0, shared)) / MIB


def _peak_of(profiler: profile) -> int:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_bytes())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda c: c[0]):
        held += change
        peak = max(peak, held)
    return peak
