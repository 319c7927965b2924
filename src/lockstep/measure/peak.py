"""The peak arithmetic rate that MFU is a share of: published for GPUs, measured for CPUs."""

import time
from statistics import mean

import torch

from lockstep.comm.collectives import all_gather_objects
from lockstep.comm.hosts import hosts_meet
from lockstep.layout.world import World

# Dense rates in FLOP/s by the vendor's datasheets (SXM parts), for the matrix units' dtype.
GPU_PEAKS = {
    "B200": {"bf16": 2250e12, "fp32": 1125e12},
    "H200": {"bf16": 989e12, "fp32": 494e12},
    "H100": {"bf16": 989e12, "fp32": 494e12},
    "A100": {"bf16": 312e12, "fp32": 156e12},
    "L40S": {"bf16": 362e12, "fp32": 183e12},
    "L4": {"bf16": 121e12, "fp32": 60e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
}


def peak_flops(world: World, precision: str) -> tuple[float, str]:
    """(FLOP/s that a rank can reach at best while all do, where the number comes from). Every rank must call it."""
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        for known, peaks in GPU_PEAKS.items():
            if known in name.replace("-", " ").split():
                rate = peaks.get(precision) or peaks.get("bf16" if precision in ("fp16", "fp8") else "fp32", 0.0)
                said = f"datasheet of {known}" + (", bf16" if precision == "fp8" else "")
                return rate / world.ranks_on_device, said
    key = (world.size, world.device)
    here = {size: rate for (size, device), rate in _measured.items() if device == world.device}
    mine = here.get(world.size, next(iter(here.values()), None) if world.keeps_going else None)
    # A process that has come later has measured nothing: the ranks agree whether to measure.
    already = [found for found in all_gather_objects(mine, world.group) if found is not None]
    _measured[key] = already[0] if already else measured_peak(world)
    return _measured[key], "measured matrix product"


_measured: dict[tuple[int, torch.device], float] = {}
"""In this process: it takes most of a second."""


def measured_peak(world: World, size: int = 1024, windows: int = 4, seconds: float = 0.15) -> float:
    """FLOP/s of square fp32 matrix products, the mean of all ranks in the best of some windows of time.

    In a window all ranks multiply at the same time: ranks that share cores cannot each count a core for themselves.
    """
    numbers = torch.Generator(world.device).manual_seed(0)  # not the stream that training draws from
    a = torch.rand(size, size, device=world.device, generator=numbers)
    (a @ a).sum().item()
    rates = []
    for _ in range(windows):
        hosts_meet(world.device, world.group)
        start, products = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            (a @ a).sum().item()
            products += 1
        rates.append(2 * size**3 * products / (time.perf_counter() - start))
    everyone = all_gather_objects(rates, world.group)
    return max(mean(window) for window in zip(*everyone, strict=True))


def slow_precision(device: str, precision: str, compiled: bool) -> list[str]:
    """A line about it, where a precision costs time instead of saving it."""
    if device == "cuda" and precision == "fp8" and not compiled:
        return ["FP8 is slower than bf16 unless rounding is fused with what comes before: give --train.compile blocks"]
    if device == "cpu" and precision == "fp8":
        return ["a CPU has no units for FP8: numbers are rounded to it and multiplied in fp32, which is much slower"]
    if device != "cpu" or precision != "bf16" or has_bf16_units():
        return []
    return ["this CPU has no units for bf16: it is much slower than fp32 here"]


def has_bf16_units() -> bool:
    """Whether oneDNN, which multiplies matrices on CPUs, does so in bf16 on this one."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
