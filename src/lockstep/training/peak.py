"""The peak arithmetic rate that MFU is a share of: published for GPUs, measured for CPUs."""

import time

import torch

from lockstep.world import World

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
    """(FLOP/s that one rank can reach at best, where the number comes from)."""
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        for known, peaks in GPU_PEAKS.items():
            if known in name.replace("-", " ").split():
                rate = peaks.get(precision) or peaks.get("bf16" if precision == "fp16" else "fp32", 0.0)
                return rate / world.ranks_on_device, f"datasheet of {known}"
    return measured_peak(world.device), "measured matrix product"


def measured_peak(device: torch.device, size: int = 1024, repeats: int = 12) -> float:
    """FLOP/s of a square fp32 matrix product, the best of some."""
    a = torch.rand(size, size, device=device)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def has_bf16_units() -> bool:
    """Whether oneDNN, which multiplies matrices on CPUs, does so in bf16 on this one."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
