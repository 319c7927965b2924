"""One rank of a run that keeps going when others are lost: which ranks there are, and groups formed anew.

The launcher (`keep_going.py`) numbers generations: each is a list of processes, in the order of their ranks, written to
its store. A thread of each process reads it:

- a process of the present generation is gone, and other ranks wait for it: all waits are interrupted at once
- others have come while the present generation was still being formed: likewise, and the newest one is formed
- others have come later: the step is finished first, and all ranks learn in it that it is the last of this generation

A rank that leaves a generation in the middle of a step notes that in the store, which interrupts the ranks that are
still in it. Then it waits for a newer generation that it is a member of.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import PeerError
from lockstep.launch.calls import record_calls
from lockstep.launch.options import Launch
from lockstep.launch.regroup import INTERRUPT
from lockstep.launch.watch import store_at, watching
from lockstep.layout.world import World, collective_timeout

LOOK_EVERY = 0.05
"""Seconds between two looks for a new generation."""
TO_NOTICE = 5.0
"""Seconds in which the launcher sees that a process has ended, on a machine that is busy."""
TO_JOIN = 20.0
"""Seconds in which processes that have all arrived form their groups."""
PREFIX = "keep-going"
LATEST, READY, ARRIVED, STATE = "latest", "ready", "arrived", "state"
"""Keys: the newest generation; the processes that can join one, that are joining it, and that have the run's state."""
FORMED, REACHED, LEFT = "formed", "reached", "left"
"""The newest generation that has begun; how many steps it has taken; those that a rank has left within a step."""


@dataclass(frozen=True)
class Generation:
    """Which processes are ranks, until one is lost or another comes."""

    number: int
    members: tuple[int, ...]
    """Numbers of processes, by rank."""

    def to_json(self) -> str:
        return json.dumps([self.number, self.members])

    @classmethod
    def from_json(cls, text: str | bytes) -> "Generation":
        number, members = json.loads(text)
        return cls(number, tuple(members))


NONE_YET = Generation(0, ())


class Membership:
    """Of one process."""

    def __init__(self, process: int, address: str, launch: Launch) -> None:
        """`process`: its number, which no other has. `address`: of the launcher's store."""
        self.process, self.address, self.launch = process, address, launch
        self.present = self.latest = NONE_YET
        """The generation that this process is in, or was in last; the newest one."""
        self._when_others_come: Callable[[], None] | None = None
        """Called, from another thread, when the present generation is to end behind its step; None: not begun."""
        self._steps: Callable[[], int] = int
        self._groups = ExitStack()
        self._changed = threading.Condition()
        self._store = self._connected()
        self._watching = self._connected()
        threading.Thread(target=self._watch, name="lockstep membership", daemon=True).start()

    def _connected(self) -> dist.Store:
        return dist.PrefixStore(PREFIX, store_at(self.address, self.launch.timeout))

    @property
    def came_late(self) -> bool:
        """In the place of a process that was lost: others are under way."""
        return self.process >= (self.launch.nproc or 1)

    def is_ready(self) -> None:
        """It can join the next generation: no rank will have to wait for it."""
        self._store.set(f"{READY}/{self.process}", "")

    def begins(self, steps: Callable[[], int], when_others_come: Callable[[], None]) -> None:
        """The present generation takes steps from now on: this process has the run's state. `steps`: how many."""
        self._store.set(f"{STATE}/{self.process}", "")
        if self.present.members[0] == self.process:
            self._store.set(REACHED, str(steps()))
            self._store.set(FORMED, self.present.to_json())
        with self._changed:
            self._when_others_come, self._steps = when_others_come, steps
            if self.latest.number > self.present.number:  # a rank alone has no waits that could be interrupted
                when_others_come()

    # ---- generations ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_EVERY)
            with suppress(dist.DistError, RuntimeError):  # the launcher is gone, and this process ends with it
                if self._watching.check([LATEST]):
                    self._see(Generation.from_json(self._watching.get(LATEST)))
                with self._changed:
                    present, has_begun = self.present.number, self._when_others_come is not None
                    is_first = self.present.members[:1] == (self.process,)
                if has_begun and is_first:
                    self._watching.set(REACHED, str(self._steps()))
                if self._watching.check([f"{LEFT}/{present}"]):
                    self._interrupt(present)

    def _see(self, generation: Generation) -> None:
        with self._changed:
            if generation.number <= self.latest.number:
                return
            self.latest = generation
            self._changed.notify_all()
            is_lost = not set(self.present.members) <= set(generation.members)
            if is_lost or self._when_others_come is None:
                INTERRUPT.set()
            else:
                self._when_others_come()

    def _interrupt(self, generation: int) -> None:
        """Waits in that generation, and in no later one."""
        with self._changed:
            if self.present.number == generation:
                INTERRUPT.set()

    def is_over(self) -> bool:
        """Whether there is a newer generation than the present one: asked where ranks must agree, so of the store."""
        self._see(Generation.from_json(self._store.get(LATEST)))
        return self.latest.number > self.present.number

    def will_be_over(self, error: Exception) -> bool:
        """Whether others are to blame for an error: when the launcher has had time to notice that one has ended."""
        within = TO_NOTICE if is_about_others(error) else LOOK_EVERY * 4
        with self._changed:
            return self._changed.wait_for(lambda: self.latest.number > self.present.number, within)

    def join(self) -> World:
        """With the other processes of the newest generation, once there is one that this process is in."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.latest.number > self.present.number and self.process in self.latest.members
            )
            self.present = self.latest
            INTERRUPT.clear()
        members = self.present.members
        rank, size = members.index(self.process), len(members)
        for name in ("RANK", "LOCAL_RANK"):
            os.environ[name] = str(rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[name] = str(size)
        os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = self.address.rpartition(":")
        known, timeout = self.present.number - 1, self.launch.timeout
        if size == 1:
            return World(timeout=timeout, restarts=known, keeps_going=True)
        record_calls()
        self._await_others(members)
        store = dist.PrefixStore(f"generation {self.present.number}", store_at(self.address, timeout))
        store.set_timeout(timedelta(seconds=TO_JOIN))
        dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=collective_timeout(timeout))
        self._groups.enter_context(watching(rank, size, timeout))
        return World(rank, size, rank, backend="shm", timeout=timeout, restarts=known, keeps_going=True)

    def _await_others(self, members: tuple[int, ...]) -> None:
        """A member may have a long step to end. One that never comes is lost, and then there is a newer generation."""
        place = f"{ARRIVED}/{self.present.number}"
        self._store.set(f"{place}/{self.process}", "")
        while not self._store.check([f"{place}/{member}" for member in members]):
            if INTERRUPT.is_set():
                raise PeerError("ranks were lost, or have come, while others joined")
            time.sleep(0.005)

    def leave(self, behind_a_step: bool = False) -> None:
        """The present generation, whatever its groups are doing; all its ranks together `behind_a_step`."""
        if not behind_a_step:
            self._store.set(f"{LEFT}/{self.present.number}", "")
        with self._changed:
            self._when_others_come = None
            INTERRUPT.set()
        with suppress(dist.DistError, RuntimeError, PeerError):
            self._groups.close()
        if dist.is_initialized():
            with suppress(dist.DistError, RuntimeError, PeerError):
                dist.destroy_process_group()
        forget_groups()


def is_about_others(error: BaseException | None) -> bool:
    """Another rank has ended, or is not waited for any more, somewhere in the chain of causes."""
    while error is not None and not isinstance(error, PeerError):
        error = error.__cause__ or error.__context__
    return error is not None


def forget_groups() -> None:
    """Torch calls groups by their number, counts one that could not be made too, and starts again only when the world's
    group is destroyed. Ranks that count differently look for each other under different names.
    """
    known = getattr(dist.distributed_c10d, "_world", None)  # private: nothing public has the count
    if known is not None and not dist.is_initialized():
        known.group_count = 0
