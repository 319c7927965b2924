"""How long a pipeline's ranks idle, and what they hold and send: p ranks, m micro-batches, v chunks per rank.

A forward takes 1, a backward 2 (half of it for the weights).

    name           idle of a rank    micro-batches held by rank r
    naive          3m(p-1)           1
    gpipe          3(p-1)            m
    1f1b           3(p-1)            p - r
    interleaved    3(p-1)/v          (2(p - r - 1) + (v - 1)p + 1) / v
    zb-h1          p - 1             p
    zb-v           (p - 1)/2         p

These are written independently of `schedule.py`: `verify` compares what is really executed with them.
"""

from lockstep.parallel.law import NOTHING, Sent, message
from lockstep.parallel.pipeline.schedule import Placement

MICRO_BATCH = 3.0
"""Time of a micro-batch on a rank, forward and backward, in the table's unit."""


def idle(schedule: str, p: int, m: int, v: int) -> float:
    """Idle time of a rank, in the table's unit."""
    return {
        "naive": 3.0 * m * (p - 1),
        "gpipe": 3.0 * (p - 1),
        "1f1b": 3.0 * (p - 1),
        "interleaved": 3.0 * (p - 1) / v,
        "zb-h1": 1.0 * (p - 1),
        "zb-v": 0.5 * (p - 1),
    }[schedule]


def held(schedule: str, p: int, m: int, v: int, rank: int) -> float:
    """The most micro-batches whose activations a rank holds at once; a chunk counts as its share of one."""
    most = {
        "naive": 1.0,
        "gpipe": float(m),
        "1f1b": float(p - rank),
        "interleaved": (2 * (p - rank - 1) + (v - 1) * p + 1) / v,
        "zb-h1": float(p),
        "zb-v": float(p),
    }[schedule]
    return min(most, float(m))


def activations(placement: Placement, rank: int, nbytes: float, micro_batches: int) -> Sent:
    """Activations to the next part, gradients to the previous one, where those are on other ranks. `nbytes`: of all
    micro-batches, between two parts.
    """
    neighbours = 0
    for chunk in range(placement.chunks):
        part = placement.part(rank, chunk)
        for other in (part - 1, part + 1):
            neighbours += 0 <= other < placement.parts and placement.place(other)[0] != rank
    return (message(nbytes) * neighbours).in_pieces(micro_batches) if neighbours else NOTHING


def forward_activations(placement: Placement, rank: int, nbytes: float, micro_batches: int) -> Sent:
    """Of a forward pass without a backward: to the next part."""
    parts = [placement.part(rank, chunk) for chunk in range(placement.chunks)]
    following = sum(p + 1 < placement.parts and placement.place(p + 1)[0] != rank for p in parts)
    return (message(nbytes) * following).in_pieces(micro_batches) if following else NOTHING


def tied(nbytes: float, stages: int) -> Sent:
    """The gradient of a weight that `stages` share: this rank's part of it to each of the others."""
    return message(nbytes) * (stages - 1)
