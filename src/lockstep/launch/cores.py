"""Which cores this process has, and what the processes that it starts inherit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def local_cores() -> set[int]:
    """Cores that this process may use, which a container, `taskset` or srun may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(psutil.cpu_count() or 1))


def available_cores() -> int:
    return len(local_cores())


def use_cores(cores: set[int]) -> None:
    """Let this process, and the threads that it will start, use them."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


@contextmanager
def changed_environment(**values: str) -> Iterator[None]:
    """For the processes that start meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
