"""Each element is counted once, by the first rank that holds it, without any rank seeing the regions of all."""

import random
from math import prod

import torch

from lockstep.comm.collectives import all_gather_objects
from lockstep.comm.ledger import Ledger, recording
from lockstep.layout.group import group_of
from lockstep.layout.region import Region
from lockstep.layout.world import World
from lockstep.parallel.counting import count_once
from tests.ranks import on_ranks

RANKS = 4


def held_by(rank: int, seed: int) -> dict[str, Region]:
    """Whole copies, ZeRO's pieces, rows of tensor parallelism, heads that two ranks share, one stage's own layers, and
    a parameter of one element."""
    draw = random.Random(seed)
    rows = draw.randint(RANKS, 9)
    shape = (rows, draw.randint(1, 5))
    cuts = sorted(draw.choices(range(prod(shape) + 1), k=RANKS - 1))
    start, stop = [0, *cuts, prod(shape)][rank : rank + 2]
    per_pair = rows // 2
    pair = rank // 2
    heads = (pair * per_pair, rows if pair else per_pair)
    pairs = Region.slice(shape, 0, heads)
    half = pairs.part(0, pairs.numel // 2) if rank % 2 == 0 else pairs.part(pairs.numel // 2, pairs.numel)
    shared = Region.slice(shape, 0, (rank * rows // RANKS, min(rows, rank * rows // RANKS + rows // 2)))
    found = {
        "copy": Region.whole(shape),
        "piece": Region.whole(shape).part(start, stop),
        "heads of two": pairs,
        "piece of heads of two": half,
        "overlapping rows": shared,
        "one element": Region.whole((1,)) if rank == draw.randrange(RANKS) else Region.whole((1,)).part(0, 0),
        f"layer {pair}": Region.whole(shape),
        "no dimension": Region.whole(()),
    }
    order = list(found)
    draw.shuffle(order)
    return {name: found[name] for name in order}


def check(world: World) -> None:
    group = group_of()
    for seed in range(12):
        mine = held_by(world.rank, seed)
        counted = count_once(mine, group, world.device)
        everyone = all_gather_objects((mine, counted.boxes))
        for name in {name for regions, _ in everyone for name in regions}:
            shape = next(regions[name].shape for regions, _ in everyone if name in regions)
            times, held = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
            for regions, boxes in everyone:
                for box in boxes.get(name, ()):
                    times[box.slices] += 1
                for box in regions[name].boxes if name in regions else ():
                    held[box.slices] = True
            assert torch.equal(times, held.float()), f"{name} (seed {seed}): {times}"
        before = [regions for regions, _ in everyone[: world.rank]]
        wanted = {n: r.minus(t[n] for t in before if n in t) for n, r in mine.items()}
        overlap = counted.overlapping
        assert {n: counted.boxes[n] for n in mine if n not in overlap} == {
            n: wanted[n] for n in mine if n not in overlap
        }
        assert not counted.everywhere
    copies = {f"layers.{i}": Region.whole((3, i + 1)) for i in range(5)}
    assert count_once(copies, group, world.device).everywhere
    fewer = {name: region for name, region in copies.items() if world.rank or name != "layers.0"}
    assert not count_once(fewer, group, world.device).everywhere
    nothing = count_once({} if world.rank == 1 else copies, group, world.device)
    assert not nothing.everywhere
    assert bool(any(nothing.boxes.values())) == (world.rank == 0)


def test_each_element_is_counted_once() -> None:
    on_ranks(check, RANKS)


def gathered_bytes(world: World) -> float:
    regions = {f"blocks.{i}.attention.qkv.weight": Region.whole((96, 32)).part(world.rank, 90) for i in range(50)}
    ledger = Ledger(world.device)
    with recording(ledger):
        count_once(regions, group_of(), world.device)
    return sum(entry.nbytes for entry in ledger.entries)


def test_what_is_gathered_is_four_numbers_a_parameter_and_no_region() -> None:
    for nbytes in on_ranks(gathered_bytes, 3):
        assert nbytes == 8 + 3 * 50 * 4 * 8
