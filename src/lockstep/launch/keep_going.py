"""The launcher of a run that keeps going: it starts the ranks, says who takes part, and starts lost ones again.

1. every process says when it is ready; when all are, the first generation begins
2. a process that ends, or is stopped for longer than a moment, is lost: the others are the next generation, at once
3. in its place another one is started; when it is ready, it is added, and that is a generation too

Who takes part is decided here alone, so that all processes see the same. A user's mistake ends the run, and so does a
step that costs a rank again and again: what fails there would fail at every try.
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from lockstep.errors import RankError, UserError
from lockstep.launch import start
from lockstep.launch.failure import ended_by
from lockstep.launch.leftovers import FOLDER_PREFIX, remove_leftovers
from lockstep.launch.membership import FORMED, LATEST, PREFIX, REACHED, READY, STATE, Generation, Membership
from lockstep.launch.options import Launch
from lockstep.launch.processes import signature
from lockstep.launch.rank import FOLDER, StartMethod, become_a_rank, ctrl_c_held_back, leave, unless_it_leaves
from lockstep.launch.start import check_nproc, passing_on, rank_environment, start_server, usual_method
from lockstep.words import counted

TICK = 0.02
"""Seconds between two looks at the processes; an end of one is seen at once."""
STOPPED_FOR = 1.0
"""Seconds for which a process may be stopped (SIGSTOP)."""
LOSSES_AT_ONE_STEP = 4
"""So often ranks may be lost without a step between: then it is the step that costs them."""


@dataclass
class Started:
    """A process of a rank, or of one that is to be."""

    process: Any
    outcome: Path
    """The file in which it leaves what became of it."""
    stopped_since: float | None = None

    def end(self) -> tuple[str, Any]:
        """What became of it: (done, its result), (mistake, the line) or (failed, what was the matter)."""
        if self.outcome.exists():
            found: tuple[str, Any] = pickle.loads(self.outcome.read_bytes())
            return found
        return "failed", ended_by(self.process.exitcode)


@dataclass
class Losses:
    """How often ranks were lost behind the same step."""

    step: str = ""
    count: int = 0
    first: str = ""
    """What was the matter with the first of them."""

    def add(self, step: str, why: str) -> None:
        if step != self.step:
            self.step, self.count, self.first = step, 0, why
        self.count += 1
        if self.count > LOSSES_AT_ONE_STEP:
            raise RankError(
                f"{counted(self.count, 'rank')} were lost behind step {step}, and none of the others got on; the "
                f"first: {self.first}"
            )


@dataclass
class Launcher:
    """Of one run. `start`: makes the process of a number."""

    nproc: int
    start: Callable[[int], Started]
    store: dist.Store
    live: dict[int, Started] = field(default_factory=dict)
    done: dict[int, Any] = field(default_factory=dict)
    generation: Generation = field(default_factory=lambda: Generation(0, ()))
    losses: Losses = field(default_factory=Losses)
    _next: int = 0

    def run(self) -> list[Any]:
        """The results of the last generation's ranks."""
        try:
            while True:
                while len(self.live) < self.nproc and not self.done:
                    self.live[self._next] = self.start(self._next)
                    self._next += 1
                wait([one.process.sentinel for one in self.live.values()], timeout=TICK)
                self._report(self._ended())
                if not self.done:
                    self._announce(self._next_members())
                if self.done and not any(number in self.live for number in self._formed().members):
                    return self._results()
                self._end_stopped()
        finally:
            for one in self.live.values():
                one.process.kill()
            for one in self.live.values():
                one.process.join()

    def _formed(self) -> Generation:
        """The newest generation whose ranks have found each other: a later one may have come when all was done."""
        return Generation.from_json(self.store.get(FORMED)) if self.store.check([FORMED]) else self.generation

    def _results(self) -> list[Any]:
        members = self._formed().members
        if members[0] not in self.done:
            raise RankError(
                f"the first rank was lost when others had finished, and with it what it writes: {self.losses.first}\n"
                f"with --checkpoint.every N and --resume auto one can go on from the last checkpoint"
            )
        return [self.done[number] for number in members if number in self.done]

    def _ended(self) -> dict[int, str]:
        """Processes that are lost, and why."""
        lost = {}
        for number, one in list(self.live.items()):
            if one.process.exitcode is None:
                continue
            del self.live[number]
            what, said = one.end()
            has_begun = self.store.check([FORMED])
            if what == "mistake" and (not has_begun or self.store.check([f"{STATE}/{number}"])):
                raise UserError(said)
            if what == "done":
                self.done[number] = said
            else:
                lost[number] = str(said)
        return lost

    def _report(self, lost: dict[int, str]) -> None:
        present = self.generation.members
        for number, why in lost.items():
            step = self.store.get(REACHED).decode() if self.store.check([REACHED]) else "0"
            self.losses.add(step, why)
            rank = f"rank {present.index(number)}" if number in present else "a rank that had not joined yet"
            others = [other for other in present if other in self.live]
            go_on = f"; {counted(len(others), 'rank')} {'go' if len(others) != 1 else 'goes'} on" if others else ""
            what, _, traceback_ = why.partition("\n")
            print(f"{rank} is lost: {what}{go_on}", *filter(None, [traceback_]), sep="\n", file=sys.stderr, flush=True)

    def _next_members(self) -> tuple[int, ...]:
        """Of the next generation; none: not all processes are ready for the first one."""
        present = self.generation.members
        ready = [number for number in self.live if self.store.check([f"{READY}/{number}"])]
        if not present:
            return tuple(ready) if len(ready) == self.nproc else ()
        survivors = [number for number in present if number in self.live]
        if self.store.check([FORMED]):  # those that had not begun yet have nothing to go on with
            survivors = [number for number in survivors if self.store.check([f"{STATE}/{number}"])]
        if not survivors:
            raise RankError(
                f"all ranks were lost, and with them the run's state: {self.losses.first}\nwith --checkpoint.every "
                f"N and --resume auto one can go on from a checkpoint"
            )
        return tuple(survivors + [number for number in ready if number not in survivors])

    def _announce(self, members: tuple[int, ...]) -> None:
        """The next generation, if it is another one."""
        present = self.generation.members
        if present and set(members) - set(present):
            print(f"{counted(len(members), 'rank')} again", file=sys.stderr, flush=True)
        if members and members != present:
            self.generation = Generation(self.generation.number + 1, members)
            self.store.set(LATEST, self.generation.to_json())

    def _end_stopped(self) -> None:
        """A process that is stopped answers no other rank, and does not end by itself."""
        for one in self.live.values():
            with suppress(psutil.Error):
                is_stopped = psutil.Process(one.process.pid).status() == psutil.STATUS_STOPPED
                if not is_stopped:
                    one.stopped_since = None
                elif one.stopped_since is None:
                    one.stopped_since = time.monotonic()
                elif time.monotonic() - one.stopped_since > STOPPED_FOR:
                    one.process.kill()


def run_keeping_going(function: Callable[..., Any], *args: Any, launch: Launch) -> list[Any]:
    """Run `function(membership, *args)` on every rank; the results of those that were there at the end, by rank."""
    nproc = launch.nproc or 1
    check_nproc(launch, nproc)
    method = start.START_METHOD or usual_method(launch)
    remove_leftovers()
    with rank_environment(nproc, None), tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{signature()}-") as folder:
        if method == "forkserver":
            start_server()
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = f"127.0.0.1:{server.port}"
        environment = {**os.environ, FOLDER: os.getcwd()}
        context: Any = multiprocessing.get_context(method)

        def started(number: int) -> Started:
            outcome = Path(folder, f"outcome-{number}")
            given = function, args, launch, os.getpid(), method, environment, folder, number, address, str(outcome)
            process = context.Process(target=member_main, args=given, daemon=False)
            with ctrl_c_held_back():
                process.start()
            return Started(process, outcome)

        with passing_on(saves_when_stopped=True) as received:
            try:
                return Launcher(nproc, started, dist.PrefixStore(PREFIX, server)).run()
            except RankError:
                if received:
                    raise KeyboardInterrupt(f"{received[0]}: all ranks were ended") from None
                raise


def member_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    launch: Launch,
    launcher: int,
    method: StartMethod,
    environment: dict[str, str],
    folder: str,
    number: int,
    address: str,
    outcome: str,
) -> None:
    """The life of one process."""
    become_a_rank(launcher, method, environment, folder)
    try:
        result = unless_it_leaves(number, function, Membership(number, address, launch), *args)
    except KeyboardInterrupt:
        raise
    except UserError as mistake:
        _note(outcome, "mistake", str(mistake))
        leave()
    except BaseException as error:
        _note(outcome, "failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        leave()
    _note(outcome, "done", result)


def _note(outcome: str, what: str, said: Any) -> None:
    """Whole, or not there."""
    temporary = Path(f"{outcome}.new")
    temporary.write_bytes(pickle.dumps((what, said)))
    temporary.replace(outcome)
