"""How long collectives take: latency and bytes over the links that a group really spans."""

from math import log2

from lockstep.plan.constants import Constants
from lockstep.plan.machine import Machine

GATHER, REDUCE = 1, 2
"""Times that the bytes go round: an all-gather or reduce-scatter once, an all-reduce twice."""


def collective_seconds(
    payload: float,
    ranks: int,
    stride: int,
    machine: Machine,
    constants: Constants,
    times: int = GATHER,
) -> float:
    """Of `payload` bytes (the whole array) among `ranks`, of which neighbours are `stride` apart.

    Inside a node by its links; over several nodes in rings that use every GPU's own link to the outside, each of which
    carries the bytes that leave the node: hierarchical, as NCCL does it. Groups side by side share those links, which
    is counted: each GPU has its own.
    """
    if ranks <= 1 or payload <= 0:
        return 0.0
    here = max(1, min(ranks, machine.gpus_per_node // max(1, stride)))
    inside_rate = machine.inside.gb_per_s * 1e9 * inside_share(here, machine, constants)
    if here >= ranks:
        steps = times * (ranks - 1)
        hop = machine.inside.latency_us * 1e-6 * constants["latency"]
        return times * payload * (ranks - 1) / ranks / inside_rate + min(steps, 4 * log2(ranks) + 1) * hop
    nodes = ranks / here
    outside_rate = machine.between.gb_per_s * 1e9 * constants["between"]
    # each GPU carries what its node sends, divided by the ranks that the node has in the group
    outside = times * payload * (nodes - 1) / nodes / here / outside_rate
    inside = times * payload * (here - 1) / here / inside_rate
    hops = times * (machine.between.latency_us * log2(max(2, nodes)) * 2 + machine.inside.latency_us * here)
    return max(outside, inside) + hops * 1e-6 * constants["latency"]


def inside_share(ranks: int, machine: Machine, constants: Constants) -> float:
    """Of a node's links, that a group of so many reaches."""
    if machine.architecture == "volta" and machine.gpus_per_node == 8:  # a mesh of cubes: pairs have 1 or 2 of 6 links
        return constants["inside"] * {1: 1.0, 2: constants["mesh_pair"], 4: constants["mesh_four"]}.get(ranks, 0.8)
    if machine.inside.gb_per_s <= 64 and ranks > 4:  # PCIe: the switches' way to the host is shared
        return 0.42
    return constants["inside"]


def message_seconds(payload: float, apart: int, machine: Machine, constants: Constants) -> float:
    """From one rank to one that is `apart` ranks away."""
    if payload <= 0:
        return 0.0
    outside = apart >= machine.gpus_per_node
    link = machine.between if outside else machine.inside
    share = constants["between" if outside else "inside"]
    rate = link.message_gb_per_s or link.gb_per_s * share
    return payload / (rate * 1e9) + link.latency_us * 1e-6 * constants["latency"]


def exchange_seconds(
    payload: float, ranks: int, stride: int, machine: Machine, constants: Constants, copies: int = 1
) -> float:
    """An all-to-all in which each rank sends `payload` bytes in all.

    `copies`: of what is sent several times to other ranks, so many go anywhere; a node gets one and hands it on.
    """
    if ranks <= 1 or payload <= 0:
        return 0.0
    here = max(1, min(ranks, machine.gpus_per_node // max(1, stride)))
    nodes = ranks / here
    once = nodes * (1 - (1 - 1 / nodes) ** copies) / copies if copies > 1 and nodes > 1 else 1.0
    inside = payload * (here - 1) / ranks / (machine.inside.gb_per_s * 1e9 * constants["inside"])
    outside = once * payload * (ranks - here) / ranks / (machine.between.gb_per_s * 1e9 * constants["between"])
    hops = machine.inside.latency_us + (machine.between.latency_us if ranks > here else 0.0)
    return max(inside, outside) + hops * 1e-6 * constants["latency"]
