"""Measure the machine that this runs on: products, attention, memory and links, by all ranks at once.

What a kind is known for stays in its file; what is measured becomes a factor of the planner's constants, or a link's
own numbers. So the same formulas hold for a machine without published results.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.bench.comm import bench_comm
from lockstep.bench.trial import Sweep
from lockstep.comm.collectives import all_gather_objects
from lockstep.comm.hosts import hosts_meet
from lockstep.layout.world import World
from lockstep.plan.constants import Constants, fitted
from lockstep.plan.kernels import attention_seconds, product_seconds
from lockstep.plan.links import inside_share
from lockstep.plan.machine import Link, Machine, kinds, machine_of
from lockstep.plan.network import Attention

SHAPES = ((512, 512, 2048), (1024, 1024, 1024), (2048, 768, 3072), (2048, 2048, 2048), (4096, 1024, 4096))
"""(m, k, n) on a CPU; on a GPU each eight times as long."""
ON_GPU, ON_CPU = ((8, 12, 1024, 64), (2, 16, 2048, 128)), ((4, 4, 256, 32), (2, 8, 512, 64))
"""Attention: batch, heads, context, dim."""
TRIES = 5
ROUND = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""Collectives of which a link's rate is taken, and how often each sends the bytes round."""
Links = dict[tuple[str, int], float]
"""Seconds of a collective of so many bytes."""


@dataclass
class Measured:
    """By one rank, while the others did the same."""

    products: list[tuple[int, int, int, str, float]]
    """m, k, n, type, seconds."""
    attention: list[tuple[int, int, int, int, float]]
    """batch, heads, context, dim, seconds, forward."""
    memory: float
    """Bytes per second that a copy reads and writes."""
    cores: int
    memory_bytes: int
    name: str


def timed(world: World, work: Callable[[], Any]) -> float:
    """Seconds; the median of some turns of 50 ms or more, all ranks at work."""
    on_gpu = world.device.type == "cuda"
    work()
    found = []
    for _ in range(TRIES):
        if world.size > 1:
            hosts_meet(world.device)
        if on_gpu:
            torch.cuda.synchronize(world.device)
        start, count = time.perf_counter(), 0
        while count < 1 or time.perf_counter() - start < 0.05:
            work()
            count += 1
            if on_gpu and count % 8 == 0:
                torch.cuda.synchronize(world.device)
        if on_gpu:
            torch.cuda.synchronize(world.device)
        found.append((time.perf_counter() - start) / count)
    return median(found)


def measure(world: World, progress: Callable[[str], None] = lambda _: None) -> tuple[list[Measured], Links]:
    """On every rank; every rank returns all."""
    device, on_gpu = world.device, world.device.type == "cuda"
    products = []
    dtypes = (torch.bfloat16, torch.float32) if on_gpu else (torch.float32,)
    for m, k, n in SHAPES:
        for dtype in dtypes:
            rows = 8 * m if on_gpu else m
            progress(f"{rows} x {k} x {n}, {dtype}")
            a, b = torch.randn(rows, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
            name = "bf16" if dtype == torch.bfloat16 else "fp32"
            products.append((rows, k, n, name, timed(world, partial(torch.mm, a, b))))
    attention = []
    for batch, heads, context, dim in ON_GPU if on_gpu else ON_CPU:
        progress(f"attention over {context}")
        dtype = torch.bfloat16 if on_gpu else torch.float32
        q = torch.randn(batch, heads, context, dim, device=device, dtype=dtype)
        seconds = timed(world, partial(F.scaled_dot_product_attention, q, q, q, is_causal=True))
        attention.append((batch, heads, context, dim, seconds))
    progress("memory")
    source = torch.empty(2**28 if on_gpu else 2**24, device=device)
    target = torch.empty_like(source)
    seconds = timed(world, lambda: target.copy_(source))
    total, name = memory_and_name(world)
    mine = Measured(products, attention, 2 * source.nbytes / seconds, torch.get_num_threads(), total, name)
    links: Links = {}
    if world.size > 1:
        progress("links")
        sweep = Sweep((4096, 262144, 4 * 2**20, 32 * 2**20), 15, 2, False)
        names = [name for name in ROUND if (name, world.backend) != ("reduce_scatter", "gloo")]  # an all-reduce there
        measured = bench_comm(world, [*names, "send_recv"], [world.backend], ["native"], sweep)
        links = {(row.collective, row.nbytes): usual(row.slowest) for row in measured}
    return all_gather_objects(mine), links


def memory_and_name(world: World) -> tuple[int, str]:
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        return int(properties.total_memory) // max(1, world.ranks_on_device), properties.name
    import psutil

    return psutil.virtual_memory().total // max(1, world.size), "CPU"


def machine_from(everyone: list[Measured], links: Links, ranks_on_device: int = 1) -> Machine:
    """The known kind, or a new one, with what was measured in place of what is said."""
    first = everyone[0]
    known = kind_of(first.name)
    base = machine_of(known) if known is not None else new_kind(first)
    base = replace(base, memory_gib=first.memory_bytes / 2**30, gpus_per_node=max(base.gpus_per_node, len(everyone)))
    if ranks_on_device > 1:  # each has its share of the GPU
        peaks = {name: peak / ranks_on_device for name, peak in base.peak_tflops.items()}
        base = replace(base, peak_tflops=peaks, memory_gb_per_s=base.memory_gb_per_s / ranks_on_device)
    constants = fitted()
    factors: dict[str, float] = {}
    for dtype in dict.fromkeys(p[3] for one in everyone for p in one.products):
        ratios = [
            product_seconds(m, k, n, dtype, base, constants) / seconds
            for one in everyone
            for m, k, n, kind, seconds in one.products
            if kind == dtype
        ]
        name = f"products_{base.architecture}_{dtype}"
        known_name = name if name in constants.values else "products_other"
        factors[known_name] = geometric(ratios)
    factors["memory"] = mean(one.memory for one in everyone) / (base.memory_gb_per_s * 1e9 * constants["memory"])
    ratios = []
    for one in everyone:
        for batch, heads, context, dim, seconds in one.attention:
            shape = Attention(heads, heads, dim, dim)
            kernel = "flash" if base.is_gpu else "matrix"
            said = attention_seconds(shape, batch * context, context, 1, kernel, base, constants.scaled(factors))
            ratios.append(said / seconds)
    rate = f"flash_{base.architecture}" if base.is_gpu else "scores_products"
    factors[rate if rate in constants.values else "flash_other"] = geometric(ratios)
    if links:
        base = replace(base, inside=link_from(links, len(everyone), base, constants))
    sources = {**base.sources, "measured": "lockstep calibrate, on this machine"}
    return replace(base, factors={name: round(value, 4) for name, value in factors.items()}, sources=sources)


def usual(seconds: list[float]) -> float:
    """The mean, without the slowest tenth: a step has many messages, and waits for the slow ones among them too."""
    kept = sorted(seconds)[: -(len(seconds) // 10) or None]
    return mean(kept)


def geometric(values: list[float]) -> float:
    return exp(mean(log(value) for value in values))


def link_from(links: Links, ranks: int, machine: Machine, constants: Constants) -> Link:
    """Rate from the largest message, latency from the smallest, as `collective_seconds` will use them."""
    sizes = sorted({nbytes for _, nbytes in links})
    once = sizes[-1] * (ranks - 1) / ranks
    seconds = {name: links[name, sizes[-1]] for name in ROUND if (name, sizes[-1]) in links}
    reached = geometric([ROUND[name] * once / spent for name, spent in seconds.items()])
    rate = reached / inside_share(ranks, replace(machine, inside=Link(reached / 1e9, 0.0)), constants)
    hop = links["all_gather", sizes[0]] / max(1, ranks - 1) / constants["latency"]
    message = sizes[-1] / links["send_recv", sizes[-1]]
    return Link(round(rate / 1e9, 4), round(1e6 * hop, 2), round(message / 1e9, 4))


def kind_of(name: str) -> str | None:
    """The file of a GPU that calls itself so."""
    text = name.lower()
    if text == "cpu":
        return None

    def likeness(kind: str) -> tuple[int, int]:  # an H200 is no H20; of several A100, the one with its memory
        stem, *rest = kind.split("-")
        sizes = sum(f"{word}gb" in text for word in rest if word.isdigit())
        return len(stem), sizes + 2 * sum(word in text for word in rest if not word.isdigit())

    found = [kind for kind in kinds() if kind.split("-")[0] in text.replace(" ", "")]
    return max(found, key=likeness, default=None)


def new_kind(first: Measured) -> Machine:
    """A machine that is known by what was measured alone: its peak is the best product's rate."""
    rates: dict[str, float] = {}
    for m, k, n, dtype, seconds in first.products:
        rates[dtype] = max(rates.get(dtype, 0.0), 2.0 * m * k * n / seconds)
    peaks = {name: round(rate / 1e12, 4) for name, rate in rates.items()}
    if "bf16" not in peaks:
        peaks |= {"bf16": peaks["fp32"], "fp64": peaks["fp32"] / 2}
    is_cpu = first.name == "CPU"
    return Machine(
        title=first.name if not is_cpu else f"CPU, {first.cores} threads of a rank",
        architecture="cpu" if is_cpu else "other",
        processors=max(1, first.cores),
        peak_tflops=peaks,
        memory_gib=first.memory_bytes / 2**30,
        memory_gb_per_s=round(first.memory / 1e9 / fitted()["memory"], 2),
        gpus_per_node=8,
        inside=Link(8.0, 20.0),
        between=Link(1.25, 60.0),
        name="here",
    )
