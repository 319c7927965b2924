"""What all tests share: no deadline for examples, and a place of the checkout's own for what DeepSpeed compiles.

No test asserts how long something takes: a machine that is busy with other things is no fault of ours.

DeepSpeed compiles under a lock that is a mere file, in a folder of the user's: one that a killed run of anything has
left there would be waited for for ever. Here nobody else compiles, so what lies here at the start is a leftover.
"""

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell that starts this in the background has it ignored, and so would every command that a test interrupts."""

settings.register_profile("lockstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockstep")

COMPILED = Path(__file__).parents[1] / ".torch_extensions"

os.environ["TORCH_EXTENSIONS_DIR"] = str(COMPILED)
for lock in COMPILED.glob("*/lock"):
    lock.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def ranks_are_forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of commands that a test calls in this process: forks of a server that has torch imported. As users
    start them, ranks are started by `test_launch.py`, and by the commands that tests run as processes.
    """
    reads_ranks = "capfd" in request.fixturenames  # what a fork prints goes where the server's output went at its start
    if request.path.name != "test_launch.py" and not reads_ranks:
        monkeypatch.setattr("lockstep.launch.start.START_METHOD", "forkserver")
    monkeypatch.setattr("lockstep.launch.start.PRELOADED", PRELOADED)


PRELOADED = (
    *("lockstep.cli.train", "lockstep.training.loop", "lockstep.verify", "lockstep.bench.train"),
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("torch.distributed.tensor.parallel", "torch.distributed.pipelining"),
)
"""What ranks of most tests import: done once, before they are forked, it is most of their processor time less."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="begin no test after so many, and fail if any is left")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BEGAN] = time.monotonic()


BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Proofs first: whatever else is left out when the minutes are over, they are not. Last those that run alone."""
    items.sort(key=lambda item: [item.get_closest_marker(n) is not None for n in ("alone", "long")])
    items.sort(key=lambda item: item.get_closest_marker("proof") is None)
    sharing = {item.path for item in items if any(of_its_module(item, n) for n in getattr(item, "fixturenames", ()))}
    for item in items:
        if item.path in sharing:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))  # fixtures are made once, by one worker


def of_its_module(item: pytest.Item, fixture: str) -> bool:
    found = item.session._fixturemanager.getfixturedefs(fixture, item)
    return found is not None and len(found) > 0 and found[-1].scope == "module"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Two workers run tests side by side (`pytest -n 2`), but nothing beside a test that is marked alone; and nothing
    beside a slow proof, whose ranks would keep those of another from their turns. To wait counts for no time-out.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ or item.config.cache is None:
        return (yield)
    folder = item.config.cache.mkdir("turns")
    marked = {mark.name for mark in item.iter_markers()}
    alone = "alone" in marked or {"slow", "proof"} <= marked
    with (folder / "next").open("w") as following, (folder / "running").open("w") as running:
        fcntl.flock(following, fcntl.LOCK_EX)  # who waits for the machine is the next to have it
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(following, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # also for a process that has been left over with the file open


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Nothing is left out in silence: what there is no time for has failed."""
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - item.config.stash[BEGAN] > 60 * minutes:
        pytest.fail(f"left out: {minutes:g} minutes are over", pytrace=False)
