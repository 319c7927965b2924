"""Who does what: degrees, groups for each purpose, and the regions that ranks hold."""

from itertools import pairwise
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.collectives import all_gather_objects
from lockstep.errors import UserError
from lockstep.layout import AXES, Degrees, Layout, Region, World
from lockstep.layout.layout import coordinates
from lockstep.layout.region import uncovered
from tests.ranks import LONG, on_ranks

# ---- degrees -------------------------------------------------------------------------------------------------


@given(st.tuples(*(st.integers(1, 3) for _ in AXES)), st.sampled_from([None, *AXES]))
def test_the_rest_goes_to_one_axis(degrees: tuple[int, ...], rest: str | None) -> None:
    whole = Degrees(*degrees)
    asked = Degrees(**{**whole.by_axis(), **({rest: -1} if rest else {})})
    assert asked.resolve(prod(degrees)) == whole


@pytest.mark.parametrize("bad", [Degrees(tp=3), Degrees(replicate=-1, tp=-1), Degrees(tp=0), Degrees(shard=-1, tp=3)])
def test_degrees_that_do_not_multiply_are_refused(bad: Degrees) -> None:
    with pytest.raises(UserError, match="parallel degrees"):
        bad.resolve(8)


def test_the_last_axis_runs_fastest() -> None:
    degrees = Degrees(pp=2, shard=3, tp=4)  # no two alike: read the other way round it is another order
    assert [coordinates(rank, degrees) for rank in (0, 1, 3, 4, 11, 12, 23)] == [
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, 1),
        (0, 0, 0, 0, 3),
        (0, 0, 1, 0, 0),
        (0, 0, 2, 0, 3),
        (1, 0, 0, 0, 0),
        (1, 0, 2, 0, 3),
    ]


# ---- groups --------------------------------------------------------------------------------------------------


def groups_on_a_rank(world: World) -> dict[str, tuple[str, list[int], bool]]:
    """Of each purpose and axis: what it spans, who is in it, and whether a sum over it is right."""
    layout = Layout(world, Degrees(pp=2, replicate=2, tp=2))
    found = {}
    named = {"batch": layout.batch, "loss": layout.loss, "gradient": layout.gradient, "norm": layout.norm}
    named |= {axis: layout.group(axis) for axis in AXES}
    for name, group in named.items():
        ranks = [world.rank] if group.process_group is None else dist.get_process_group_ranks(group.process_group)
        total = torch.tensor([float(world.rank)])
        if group.size > 1:
            dist.all_reduce(total, group=group.native)
        found[name] = (group.axis, ranks, total.item() == sum(ranks) and ranks[group.rank] == world.rank)
    mesh = layout.mesh()
    assert mesh.mesh_dim_names == ("pp", "replicate", "tp")
    assert list(mesh.get_coordinate() or []) == [layout.coordinates[a] for a in ("pp", "replicate", "tp")]
    seeds = all_gather_objects(layout.seed(100))
    assert [seed == seeds[0] for seed in seeds] == [True, True] + [False] * 6  # alike along tp only
    return found


def test_groups_for_each_purpose_on_eight_ranks() -> None:
    for rank, found in enumerate(on_ranks(groups_on_a_rank, 8, timeout=LONG)):
        assert all(right for _, _, right in found.values()), f"rank {rank}: {found}"
    assert {name: (axis, ranks) for name, (axis, ranks, _) in found.items()} == {  # of the last rank
        "batch": ("replicate", [5, 7]),
        "loss": ("pp x replicate", [1, 3, 5, 7]),
        "gradient": ("replicate", [5, 7]),
        "norm": ("pp x replicate x tp", list(range(8))),
        "pp": ("pp", [3, 7]),
        "replicate": ("replicate", [5, 7]),
        "shard": ("", [7]),
        "cp": ("", [7]),
        "tp": ("tp", [6, 7]),
    }


def test_a_rank_alone_has_groups_too() -> None:
    layout = Layout(World(), Degrees())
    assert (layout.batch.size, layout.norm.size, layout.batch.rank, layout.loss.axis) == (1, 1, 0, "")


# ---- regions -------------------------------------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 5), max_size=4)))


@given(shapes(), st.data())
def test_a_range_of_elements_is_a_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    region = Region.whole(shape).part(start, stop)
    assert region.read(whole).tolist() == list(range(start, stop))
    assert len(region.boxes) <= max(1, 2 * len(shape) - 1)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.data())
def test_tensor_parallel_and_zero_compose(parts: int, zero: int, rows: int, columns: int, data: st.DataObject) -> None:
    """Fused q, k and v, each cut into `parts`; what is left of it is cut again, element by element, into `zero`."""
    dim = data.draw(st.sampled_from([0, 1]))
    each = rows * parts
    shape = (3 * each, columns) if dim == 0 else (columns, 3 * each)
    whole = torch.randn(shape)
    held: list[Region] = []
    for part in range(parts):
        starts = [head * each + part * rows for head in range(3)]
        mine = Region.slice(shape, dim, *((start, start + rows) for start in starts))
        memory = mine.read(whole)
        cuts = [mine.numel * z // zero for z in range(zero + 1)]
        for first, last in pairwise(cuts):
            region = mine.part(first, last)
            assert torch.equal(region.read(whole), memory[first:last])
            held.append(region)
    again = torch.full(shape, torch.nan)
    for region in held:
        region.write(again, region.read(whole))
    assert torch.equal(again, whole)
    assert sum(region.numel for region in held) == whole.numel()
    assert uncovered(held, shape) == 0
    if held[0].numel:
        assert uncovered(held[1:], shape) == held[0].numel
