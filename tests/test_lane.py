"""The lane, without ranks: who may wait for whom."""

import threading

import pytest

from lockstep.comm.lane import Lane, LaneWork


@pytest.mark.timeout(60)
def test_work_that_other_work_completed_is_done_at_once() -> None:
    """Two receives, a message that answers the second: its waiter must not wait for the one that is still open."""
    for _ in range(200):  # who gets the lane when it is free is a matter of luck
        two_receives()


def two_receives() -> None:
    lane = Lane("a lane")
    first_may_end, go_on = threading.Event(), threading.Event()
    works: list[LaneWork] = []

    def first() -> LaneWork:
        assert first_may_end.wait(10)
        return works[1]

    def second() -> LaneWork:
        assert go_on.wait(2)  # set only after works[1] is done
        return works[0]

    works.append(LaneWork(lane, first, []))
    works.append(LaneWork(lane, second, []))
    for work in works:
        lane.enqueue(work)
    threading.Timer(0.005, first_may_end.set).start()  # by then this thread waits for its turn to work
    works[1].wait()
    assert not works[0].done
    go_on.set()
    works[0].wait()
    assert lane.close()


@pytest.mark.timeout(20)
def test_done_stays_done_when_what_was_run_in_its_name_fails() -> None:
    lane = Lane("a lane")
    works: list[LaneWork] = []

    def fail() -> LaneWork:
        raise ValueError("too late")

    works.append(LaneWork(lane, lambda: works[1], []))
    works.append(LaneWork(lane, fail, []))
    for work in works:
        lane.enqueue(work)
    works[1].wait()
    lane.close()
    assert works[1].is_success()
    assert isinstance(lane.broken, ValueError)
