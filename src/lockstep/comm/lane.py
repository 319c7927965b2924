"""A lane: a queue of work that runs in order, on the lane's thread or on the caller's.

The lane's thread runs what was submitted, so that it overlaps with whatever the caller does. A caller that
waits has nothing else to do, so it runs the work itself, instead of waking a thread and waiting for it: this
makes a small synchronous collective cheap.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.openmp import use_one_thread_here

DELAY = 0.002
"""The most seconds by which `late` delays each piece of work."""
_delays: random.Random | None = None


@contextmanager
def late(seed: int) -> Iterator[None]:
    """Inside, each piece of work starts after a random delay: a caller that forgets to wait uses stale data."""
    global _delays
    before, _delays = _delays, random.Random(seed)
    try:
        yield
    finally:
        _delays = before


class LaneWork(dist.Work):
    """Work that is queued on a lane. torch's engines, including the C++ ones, use it as a `dist.Work`."""

    def __init__(self, lane: "Lane", run: "Run", result: list[torch.Tensor]) -> None:
        super().__init__()
        self._lane, self._run, self._result = lane, run, result
        self._future: torch.futures.Future[Any] | None = None
        self._error: Exception | None = None
        self._told = False
        self.done = False

    def run(self) -> "LaneWork":
        """Called by the lane, once. Returns the work that this has completed: usually this one."""
        if _delays is not None:
            time.sleep(DELAY * _delays.random())
        finished: LaneWork | None = None
        failure: Exception | None = None
        try:
            self._lane.check()
            finished = self._run()
        except BaseException as error:
            self._lane.broken = self._lane.broken or error
            if not isinstance(error, Exception):  # Ctrl-C while the caller did the work
                raise
            failure = error
        self._run = _nothing  # releases what it worked on
        finished = finished or self
        finished.finish(failure)
        return finished

    def finish(self, error: Exception | None = None) -> None:
        """Mark it done, unless it is already: a later failure, while running other work, does not change its result."""
        with self._lane.bookkeeping:
            if not self.done:
                self._error = error
                self.done = True
                self._lane.bookkeeping.notify_all()

    def complete(self) -> None:
        """Complete the future, if one was asked for. Its callbacks may well use the lane again."""
        with self._lane.bookkeeping:
            future, self._told = self._future if not self._told else None, True
        if future is not None:
            self._complete(future)

    def _complete(self, future: "torch.futures.Future[Any]") -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.done:
            self._lane.work_until(self)
        if self._error is not None:
            raise self._error
        return True

    @classmethod
    def finished(cls, lane: "Lane", result: list[torch.Tensor]) -> "LaneWork":
        """For a caller that wants a Work for what is already done."""
        work = cls(lane, _nothing, result)
        work.done = work._told = True
        return work

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> "torch.futures.Future[Any]":
        with self._lane.bookkeeping:
            late = self._future is None and self._told
            self._future = self._future or torch.futures.Future()
        if late:
            self._complete(self._future)
        return self._future


Run = Callable[[], LaneWork | None]
"""Runs the work; returns the work that it has completed instead of its own, or None."""


def _nothing() -> None:
    """Takes the place of finished work's function."""


class Lane:
    """Does submitted work in the order of submission."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.broken: BaseException | None = None
        """The first failure. Later work would wait for ranks that are out of step, so it fails at once."""
        self.beside = False
        """The lane's thread is working, while the caller does something else."""
        self.bookkeeping = threading.Condition(threading.Lock())  # notified when work is done, or the lane is free
        self._waiting: deque[LaneWork] = deque()
        self._busy = False  # a thread works
        self._calls: SimpleQueue[bool] = SimpleQueue()  # True: there may be work; False: end
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        if self.broken is not None:
            raise RuntimeError(f"{self.name} cannot go on after an earlier failure: {self.broken}") from self.broken

    def do(self, run: Callable[..., None], *args: Any) -> None:
        """On the calling thread, do what is queued, then run(*args)."""
        finished: list[LaneWork] = []
        self._begin()
        try:
            while self._waiting:
                finished.append(self._waiting.popleft().run())
            self.check()
            try:
                run(*args)
            except BaseException as error:
                self.broken = error
                raise
        finally:
            self._end()
            for work in finished:
                work.complete()

    def submit(self, run: Run, result: list[torch.Tensor]) -> LaneWork:
        """Queue `run` for the lane's thread."""
        return self.enqueue(LaneWork(self, run, result))

    def enqueue(self, work: LaneWork) -> LaneWork:
        self._waiting.append(work)
        if threading.current_thread() is self._thread:  # a callback may wait for it, and no other thread would run it
            self.work_until(work)
            return work
        if self._thread is None:
            self._thread = threading.Thread(target=self._work_forever, name=self.name, daemon=True)
            self._thread.start()
        self._calls.put(True)
        return work

    def work_until(self, wanted: LaneWork) -> None:
        """Do the work up to and including `wanted`, as far as the thread has not done it."""
        while self._begin(wanted):
            try:
                if not self._waiting:  # it was interrupted while it was being done
                    self.check()
                finished = self._waiting.popleft().run()
            finally:
                self._end()
            finished.complete()

    def _begin(self, wanted: LaneWork | None = None) -> bool:
        """Wait until the lane is free. False if `wanted` is done first: the busy thread may wait for the caller."""
        with self.bookkeeping:
            while self._busy and not (wanted and wanted.done):
                self.bookkeeping.wait()
            if wanted and wanted.done:
                return False
            self._busy = True
            return True

    def _end(self) -> None:
        with self.bookkeeping:
            self._busy = False
            self.bookkeeping.notify_all()

    def _work_forever(self) -> None:
        use_one_thread_here()
        while self._calls.get():
            finished = None
            self._begin()
            try:
                if self._waiting:
                    self.beside = True
                    finished = self._waiting.popleft().run()
            finally:
                self.beside = False
                self._end()
            if finished is not None:
                finished.complete()
                del finished  # and with it the tensors that it holds, before sleeping

    def close(self) -> bool:
        """Let the thread finish what is queued and end. False if it is still busy after some seconds."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._calls.put(False)
        if thread is not threading.current_thread():
            thread.join(timeout=5)
        return not thread.is_alive()
