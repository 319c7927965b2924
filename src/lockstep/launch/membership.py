"""One rank of a run that keeps going when others are lost: which ranks there are, and groups formed anew.

The launcher (`keep_going.py`) numbers generations: each is a list of processes, in the order of their ranks, written to
its store. A thread of each process reads it:

- a process of the present generation is gone, so somebody waits for it: all waits are interrupted at once
- others have come while the present generation was still being formed: likewise, and the newest one is formed
- others have come later: the step is finished first, and all ranks learn in it that it is the last of this generation

Whoever leaves a generation other than behind a step says so in the store, and that interrupts whoever is still in it.
Then it waits for a newer one that it is in.
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
from lockstep.launch.watch import connected, watching
from lockstep.layout.world import World, collective_timeout

LOOK_EVERY = 0.05
"""Seconds between two looks for a new generation."""
TO_NOTICE = 5.0
"""Seconds in which the launcher sees that a process has ended."""
TO_JOIN = 20.0
"""Seconds for the processes of a generation to find each other; then one of them is lost, and there will be another."""
PREFIX = "keep-going"
LATEST, READY, FORMED, REACHED, LEFT = "latest", "ready", "formed", "reached", "left"
"""Keys: the newest generation; the processes that can join; the newest generation that has begun, and the step behind
which it did; generations that somebody has left.
"""


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
        self._groups = ExitStack()
        self._changed = threading.Condition()
        self._store = self._connected()
        self._watching = self._connected()  # a client's calls wait for each other
        threading.Thread(target=self._watch, name="lockstep membership", daemon=True).start()

    def _connected(self) -> dist.Store:
        return dist.PrefixStore(PREFIX, connected(self.address, self.launch.timeout))

    @property
    def came_late(self) -> bool:
        """In the place of a process that was lost: others are under way."""
        return self.process >= (self.launch.nproc or 1)

    def is_ready(self) -> None:
        """It can join the next generation: nobody will have to wait for it."""
        self._store.set(f"{READY}/{self.process}", "")

    def begins(self, step: int, when_others_come: Callable[[], None]) -> None:
        """The present generation takes steps from now on, behind this one."""
        if self.present.members[0] == self.process:
            self._store.set(REACHED, str(step))
            self._store.set(FORMED, self.present.to_json())
        with self._changed:
            self._when_others_come = when_others_come
            if self.latest.number > self.present.number:  # they came meanwhile, and a rank alone waits for nobody
                when_others_come()

    # ---- generations ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_EVERY)
            with suppress(dist.DistError, RuntimeError):  # the launcher is gone, and this process ends with it
                if self._watching.check([LATEST]):
                    self._see(Generation.from_json(self._watching.get(LATEST)))
                with self._changed:
                    present = self.present.number
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

    def will_be_over(self) -> bool:
        """The same, when the launcher has had time to notice that a process has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self.latest.number > self.present.number, TO_NOTICE)

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
        known = self.present.number - 1
        if size == 1:
            return World(timeout=self.launch.timeout, restarts=known)
        record_calls()
        store = dist.PrefixStore(f"generation {self.present.number}", connected(self.address, self.launch.timeout))
        store.set_timeout(timedelta(seconds=TO_JOIN))
        dist.init_process_group(
            "shm",
            store=store,
            rank=rank,
            world_size=size,
            timeout=collective_timeout(self.launch.timeout),
        )
        self._groups.enter_context(watching(rank, size, self.launch.timeout))
        return World(rank, size, rank, backend="shm", timeout=self.launch.timeout, restarts=known)

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


def forget_groups() -> None:
    """Torch calls groups by their number, counts one that could not be made too, and starts again only when the world's
    group is destroyed. Ranks that count differently look for each other under different names.
    """
    known = getattr(dist.distributed_c10d, "_world", None)  # private: nothing public has the count
    if known is not None and not dist.is_initialized():
        known.group_count = 0
