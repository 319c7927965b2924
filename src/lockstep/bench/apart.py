"""An object in a process of its own, which has all cores of the machine.

A rank begins with its share of the cores, and what multiplies its matrices may hold on to that: ARM's Compute Library
keeps the threads that it found first, whatever `torch.set_num_threads` says later. So what one process could do with
all cores of the machine is measured by a process that begins with all of them. It sleeps until it is called.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from lockstep.errors import RankError, UserError
from lockstep.launch.cores import changed_environment, use_cores
from lockstep.launch.rank import ctrl_c_held_back, die_with_parent, end_at_ctrl_c


class Apart:
    """What `make(*args)` gives, in another process on these cores."""

    def __init__(self, cores: set[int], make: Callable[..., Any], *args: Any) -> None:
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(there, os.getpid(), cores, make, args), daemon=True)
        with changed_environment(OMP_NUM_THREADS=str(len(cores))), ctrl_c_held_back():
            self._process.start()
        there.close()  # now the child's end alone: if the child is gone, we hear of it
        self._pipe = here
        try:
            self._answer()
        except Exception:
            self.end()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """The object's method, carried out there."""
        return self._answer((method, args))

    def end(self) -> None:
        self._pipe.close()
        self._process.join()

    def _answer(self, question: object = None) -> Any:
        try:
            if question is not None:
                self._pipe.send(question)
            value, error = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise RankError(f"the process that is timed alone was ended (exit code {self._process.exitcode})") from None
        if error is not None:
            raise error
        return value


def _serve(pipe: Connection, parent: int, cores: set[int], make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    end_at_ctrl_c()
    die_with_parent(parent)
    use_cores(cores)
    held, error = _tried(make, args)
    pipe.send((None, error))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return  # there will be no more calls
        pipe.send(_tried(getattr(held, method), arguments))


def _tried(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """What it gives, and what it raises."""
    try:
        return function(*args), None
    except UserError as mistake:
        return None, mistake
    except Exception:
        return None, RankError(f"in the process that is timed alone:\n{traceback.format_exc()}")
