"""Peak memory of one piece of work: the allocator's count on a GPU, the resident set on the CPU."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

MIB = 1024 * 1024


class PeakMemory:
    """Filled in when the `measure_peak` block ends."""

    mib: float = float("nan")


@contextmanager
def measure_peak(device: torch.device) -> Iterator[PeakMemory]:
    """Peak MiB that the block held above what was there before it."""
    result = PeakMemory()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield result
        result.mib = (torch.cuda.max_memory_allocated(device) - before) / MIB
        return
    _give_back_free_memory()
    _reset_high_water_mark()
    before = psutil.Process().memory_info().rss
    yield result
    result.mib = (_high_water_mark() - before) / MIB


def _give_back_free_memory() -> None:
    """glibc keeps freed memory; the next block would start from a resident set that is not its own."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def _reset_high_water_mark() -> None:
    clear_refs = Path("/proc/self/clear_refs")
    if clear_refs.exists():
        clear_refs.write_text("5")  # Linux: reset VmHWM


def _high_water_mark() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)
