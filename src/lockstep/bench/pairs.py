"""Latency and bandwidth between each two ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep.bench.comm import make_groups, percentile
from lockstep.comm.collectives import all_gather_objects
from lockstep.comm.wire import Wire
from lockstep.errors import UserError
from lockstep.layout.world import World

PING_BYTES, STREAM_BYTES = 8, 4 * 1024 * 1024


@dataclass
class Pairs:
    """Between each two ranks, one pair at a time: [from][to]."""

    latency: list[list[float]]
    """Seconds of a message of 8 bytes: half a round trip, the median."""
    bandwidth: list[list[float]]
    """Bytes per second of messages of 4 MiB, one way and back: the median."""


def bench_pairs(
    world: World, backend: str, iterations: int = 20, progress: Callable[[str], None] = lambda _: None
) -> Pairs:
    """Ping-pong between each pair of ranks, while the others wait."""
    if world.size < 2:
        raise UserError("bench comm measures what goes between ranks: it needs --nproc 2 or more")
    group = make_groups(world, [backend])[backend]
    wire = Wire(group)
    latency = [[0.0] * world.size for _ in range(world.size)]
    bandwidth = [[0.0] * world.size for _ in range(world.size)]
    for a in range(world.size):
        for b in range(a + 1, world.size):
            progress(f"pair {a} - {b}")
            mine: tuple[float, float] | None = None
            if world.rank in (a, b):
                other = b if world.rank == a else a
                small = _ping_pong(world, wire, other, PING_BYTES, 5 * iterations)
                mine = small, STREAM_BYTES / _ping_pong(world, wire, other, STREAM_BYTES, iterations)
            seen = next(found for found in all_gather_objects(mine) if found is not None)
            latency[a][b] = latency[b][a] = seen[0]
            bandwidth[a][b] = bandwidth[b][a] = seen[1]
    return Pairs(latency, bandwidth)


def _ping_pong(world: World, wire: Wire, other: int, nbytes: int, iterations: int) -> float:
    """Half a round trip, in seconds."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
    times = []
    for _ in range(iterations + 2):
        start = time.perf_counter()
        if world.rank < other:
            wire.send(tensor, other)
            wire.receive(tensor, other)
        else:
            wire.receive(tensor, other)
            wire.send(tensor, other)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append((time.perf_counter() - start) / 2)
    return percentile(times[2:], 50)
