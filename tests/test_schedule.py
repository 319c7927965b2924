"""Pipeline schedules, on their instructions alone: every pass once, no deadlock, and the laws of their shapes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import UserError, pipeline_schedule
from lockstep.parallel.pipeline.schedule import SCHEDULES, Instruction, placement_of
from lockstep.parallel.pipeline.timetable import Costs, Timetable, most_held, timetable


def clocked(name: str, p: int, m: int, v: int = 1) -> Timetable:
    return timetable(pipeline_schedule(name, p, m, v), placement_of(name, p, v))


def chunks_of(name: str, v: int) -> int:
    return v if name == "interleaved" else 2 if name == "zb-v" else 1


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 9), st.integers(1, 24), st.integers(1, 4))
def test_every_pass_once_in_an_order_that_ends(name: str, p: int, m: int, v: int) -> None:
    if name == "interleaved":
        m *= p
    v = chunks_of(name, v)
    schedule = pipeline_schedule(name, p, m, v)
    placement = placement_of(name, p, v)
    timetable(schedule, placement)  # or it raises
    assert len(schedule) == p
    split = name.startswith("zb-")
    for rank, instructions in enumerate(schedule):
        assert [i.kind for i in instructions[-2:]] == ["reduce", "step"]
        counts = Counter(instructions)
        assert set(counts.values()) == {1}
        for chunk in range(v):
            part = placement.part(rank, chunk)
            assert placement.place(part) == (rank, chunk)
            for i in range(m):
                mine = [x.kind for x in instructions[:-2] if (x.micro_batch, x.chunk) == (i, chunk)]
                passes = [kind for kind in mine if "send" not in kind and "receive" not in kind]
                assert passes == ["forward", *(["backward_input", "backward_weight"] if split else ["backward"])]
                received = [kind for kind in mine if "receive" in kind]
                assert len(received) == (part > 0 and placement.place(part - 1)[0] != rank) + (
                    part < placement.parts - 1 and placement.place(part + 1)[0] != rank
                )
    sends = Counter(x.kind for instructions in schedule for x in instructions)
    assert sends["send_activation"] == sends["receive_activation"]
    assert sends["send_gradient"] == sends["receive_gradient"]


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 13, 16])
def test_spans_and_what_is_held(p: int, m: int) -> None:
    assert clocked("naive", p, m).span == 3 * m * p
    for name in ("gpipe", "1f1b"):
        assert clocked(name, p, m).span == 3 * m + 3 * (p - 1)
    one = placement_of("1f1b", p)
    for r, instructions in enumerate(pipeline_schedule("1f1b", p, m)):
        assert most_held(instructions, one) == min(m, p - r)
    assert all(most_held(instructions, one) == m for instructions in pipeline_schedule("gpipe", p, m))
    for v in (1, 2, 3, 4):
        span = clocked("interleaved", p, m * p, v).span
        assert span == pytest.approx(3 * m * p + 3 * (p - 1) / v)
    assert all(most_held(instructions, one) <= p for instructions in pipeline_schedule("zb-h1", p, m))
    if m >= p:
        assert clocked("zb-h1", p, m).span == 3 * m + (p - 1)
    if m >= 2 * p - 1:
        folded = clocked("zb-v", p, m)
        assert folded.span == 3 * m + (p - 1) / 2
        assert [folded.idle_inside(rank) for rank in range(p)] == [0] * p
        held = [most_held(x, placement_of("zb-v", p)) for x in pipeline_schedule("zb-v", p, m)]
        assert max(held) <= p


def test_where_the_parts_are() -> None:
    assert [placement_of("interleaved", 4, 2).part(r, c) for c in (0, 1) for r in range(4)] == [*range(8)]
    assert [placement_of("zb-v", 4).part(r, 1) for r in range(4)] == [7, 6, 5, 4]


def test_costs_that_differ_move_the_clock() -> None:
    schedule, placement = pipeline_schedule("1f1b", 2, 3), placement_of("1f1b", 2)
    assert timetable(schedule, placement, Costs(2, 1, 1)).span == (3 + 1) * (2 + 2)
    assert timetable(schedule, placement).bubble == pytest.approx(1 / 4)


def test_a_schedule_that_deadlocks_is_found_out() -> None:
    backwards_first = [
        [Instruction("forward"), Instruction("receive_gradient"), Instruction("send_activation")],
        [Instruction("receive_activation"), Instruction("forward"), Instruction("send_gradient")],
    ]
    with pytest.raises(UserError, match="rank 0 waits forever at receive_gradient 0"):
        timetable(backwards_first, placement_of("1f1b", 2))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("2f2b", 2, 2), "must be one of naive, gpipe, 1f1b, interleaved, zb-h1, zb-v"),
        (("1f1b", 0, 2), "0 stages"),
        (("1f1b", 2, 0), "0 micro-batches"),
        (("interleaved", 4, 6, 2), "6 are no multiple of 4; use 8, or 1f1b"),
        (("1f1b", 2, 2, 2), "use interleaved"),
        (("zb-v", 2, 2, 3), "use 2, or interleaved"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, int, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        pipeline_schedule(*arguments)
