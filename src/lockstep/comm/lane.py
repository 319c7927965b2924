"""A lane: work that is done in order, beside the caller or by the caller.

A thread of the lane's own runs what was submitted, so that it overlaps with whatever the caller does. A caller that
waits has nothing else to do, so it does the work itself, instead of waking a thread and waiting for it: that is what
makes a small synchronous collective cheap.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.openmp import use_one_thread_here


class LaneWork(dist.Work):
    """What a lane has been given to do. torch's engines, in C++ too, know it as a Work."""

    def __init__(self, lane: "Lane", run: Callable[[], None], result: list[torch.Tensor]) -> None:
        super().__init__()
        self._lane, self._run, self._result = lane, run, result
        self._future: torch.futures.Future[Any] | None = None
        self._error: Exception | None = None
        self.done = False

    def run(self) -> None:
        """Called by the lane, once."""
        try:
            self._lane.check()
            self._run()
        except BaseException as error:
            self._lane.broken = self._lane.broken or error
            if not isinstance(error, Exception):  # Ctrl-C while the caller did the work
                raise
            self._error = error
        self._run = _nothing  # lets go of what it worked on
        with self._lane.bookkeeping:
            self.done, future = True, self._future
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
        work.done = True
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
            first = self._future is None
            if self._future is None:
                self._future = torch.futures.Future()
            late = first and self.done
        if late:
            self._complete(self._future)
        return self._future


def _nothing() -> None:
    """What is left to do of finished work."""


class Lane:
    """Does submitted work in the order of submission."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.broken: BaseException | None = None
        """The first failure. What comes after it would wait for ranks that are out of step: it fails at once."""
        self.beside = False
        """The lane's thread is at work, beside a caller that has other things to do."""
        self.bookkeeping = threading.Lock()
        self._waiting: deque[LaneWork] = deque()
        self._busy = threading.Lock()  # held by whoever works
        self._calls: SimpleQueue[bool] = SimpleQueue()  # True: there may be work; False: end
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        if self.broken is not None:
            raise RuntimeError(f"{self.name} cannot go on after an earlier failure: {self.broken}") from self.broken

    def do(self, run: Callable[..., None], *args: Any) -> None:
        """Do what is queued, then run(*args), here and now."""
        with self._busy:
            while self._waiting:
                self._waiting.popleft().run()
            self.check()
            try:
                run(*args)
            except BaseException as error:
                self.broken = error
                raise

    def submit(self, run: Callable[[], None], result: list[torch.Tensor]) -> LaneWork:
        """Queue `run`, to be done beside the caller, on the lane's thread."""
        work = LaneWork(self, run, result)
        self._waiting.append(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work_forever, name=self.name, daemon=True)
            self._thread.start()
        self._calls.put(True)
        return work

    def work_until(self, wanted: LaneWork) -> None:
        """Do the work up to and including `wanted`, as far as the thread has not done it."""
        while not wanted.done:
            with self._busy:
                if not wanted.done:
                    self._waiting.popleft().run()

    def _work_forever(self) -> None:
        use_one_thread_here()
        while self._calls.get():
            with self._busy:
                if self._waiting:
                    self.beside = True
                    self._waiting.popleft().run()
                    self.beside = False

    def close(self) -> None:
        """Let the thread finish what is queued and end."""
        if self._thread is not None:
            self._calls.put(False)
            self._thread.join(timeout=5)
            self._thread = None
