"""How long a processor computes: matrix products by shape, attention, and what only moves memory."""

from math import ceil

from lockstep.plan.constants import Constants
from lockstep.plan.machine import Machine
from lockstep.plan.network import Attention

TILE = 128
"""Rows and columns of the piece of an output that one processor computes at a time."""
BYTES = {"fp4": 0.5, "fp8": 1, "bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4, "fp64": 8}


def product_seconds(
    m: float, k: float, n: float, dtype: str, machine: Machine, constants: Constants, grouped: int = 1
) -> float:
    """(m, k) x (k, n), `grouped` of them at once: as its tiles fill the processors, or as its bytes move."""
    if m <= 0 or k <= 0 or n <= 0:
        return 0.0
    flops = 2.0 * m * k * n * grouped
    rate = machine.peak(dtype) * machine.sustained * product_efficiency(m, k, n, dtype, machine, constants, grouped)
    size = BYTES["bf16"] if BYTES[dtype] < 2 else BYTES[dtype]
    moved = size * grouped * (m * k + k * n + m * n)
    return max(flops / rate, moved / memory_rate(machine, constants))


def product_efficiency(
    m: float, k: float, n: float, dtype: str, machine: Machine, constants: Constants, grouped: int = 1
) -> float:
    """Share of the peak: the best that this kind reaches, less for tiles and waves that are not full, for a short sum,
    and for sizes that do not align.
    """
    kind = f"products_{machine.architecture}_{dtype if BYTES[dtype] <= 2 else 'fp32'}"
    bf16 = f"products_{machine.architecture}_bf16"  # fp16 runs at the rate of bf16
    best = constants.values.get(kind) or constants.values.get(bf16 if dtype == "fp16" else kind)
    best = best or constants["products_other"]
    filled = 1.0
    if machine.is_gpu:
        tiles = ceil(m / TILE) * ceil(n / TILE) * grouped
        waves = tiles / machine.processors
        wave = 1 - constants["wave_weight"] * (1 - waves / ceil(waves))
        filled = m * n * grouped / (tiles * TILE * TILE) * wave
    sums = k / (k + constants["short_sum"])
    wide = TILE if grouped > 1 else TILE // 2  # kernels of many products have no narrower tiles
    aligned = 1.0 if n % wide == 0 and k % wide == 0 else constants["unaligned"]
    shared = m / (m + constants["grouped"]) if grouped > 1 else 1.0
    return best * filled * sums * aligned * shared


def memory_rate(machine: Machine, constants: Constants) -> float:
    """Bytes per second that elementwise kernels reach."""
    return machine.memory_gb_per_s * 1e9 * constants["memory"]


def attention_seconds(
    attention: Attention,
    tokens: float,
    context: int,
    tp: int,
    kernel: str,
    machine: Machine,
    constants: Constants,
) -> float:
    """Forward, of one micro-batch's tokens on one rank."""
    heads = max(1, attention.heads // tp)
    flops = attention.flops(context) * tokens * heads / attention.heads
    if kernel == "matrix" or not machine.is_gpu:
        scores = tokens * heads * min(context, attention.window or context)
        whole = 2 * flops if attention.causal else flops  # the mask is applied to scores that were computed
        aligned = 1.0 if attention.dim % 8 == 0 else constants["unaligned"] ** 2
        dtype = {"volta": "fp16", "cpu": "fp32"}.get(machine.architecture, "bf16")
        reached = machine.peak(dtype) * machine.sustained * constants["scores_products"] * aligned
        return whole / reached + constants["scores_passes"] * 2 * scores / memory_rate(machine, constants)
    name = f"{kernel}_{machine.architecture}"
    best = constants.values.get(name, constants.values.get(f"flash_{machine.architecture}", constants["flash_other"]))
    dim = attention.dim / (attention.dim + 32) / (128 / 160)  # small heads leave the tensor cores waiting
    return flops / (machine.peak("bf16") * machine.sustained * best * min(1.0, dim))


def moving_seconds(elements: float, machine: Machine, constants: Constants, size: float = 2.0) -> float:
    return elements * size / memory_rate(machine, constants)
