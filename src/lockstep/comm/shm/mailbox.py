"""The mailbox: passes messages from one rank to one other, in order. Send and receive are built on it.

A message is a header (tag, bytes, dtype) and as many cells as it needs. The receiver takes messages as they come and
matches each with the oldest open receive of its tag; a message without a matching receive is put aside.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.lane import Lane, LaneWork
from lockstep.comm.shm import semaphore
from lockstep.comm.shm.board import DTYPES, Cell, copy
from lockstep.comm.shm.segment import Segment

DEPTH = 2
CELL_BYTES = 512 * 1024
HEADER_BYTES = 64
MAILBOX_BYTES = 2 * semaphore.SIZE + DEPTH * (HEADER_BYTES + CELL_BYTES)
Header = ctypes.c_int64 * 3
DTYPE_OF = {number: dtype for dtype, number in DTYPES.items()}


@dataclass
class Arrival:
    """A message that has arrived and has no matching receive yet."""

    tag: int
    dtype: torch.dtype
    content: Tensor


@dataclass
class Receive:
    """An open receive, which waits for its message."""

    flat: Tensor
    dtype: torch.dtype
    work: LaneWork


class Mailbox:
    """One end of the channel from one rank to another; `peer` is the other end."""

    def __init__(self, segment: Segment, peer: semaphore.Peer, timeout: float) -> None:
        self.peer, self.timeout, self.segment = peer, timeout, segment
        memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._filled, self._free = memory.data_ptr(), memory.data_ptr() + semaphore.SIZE
        cells = memory[2 * semaphore.SIZE :].view(DEPTH, HEADER_BYTES + CELL_BYTES)
        self._cells = [Cell(cell) for cell in cells]
        self._turn = 0
        self.waits = False

    def initialize(self) -> None:
        semaphore.initialize(self._filled, 0)
        semaphore.initialize(self._free, DEPTH)

    def send(self, flat: Tensor, tag: int, dtype: torch.dtype) -> None:
        """Returns once the whole message is in shared memory."""
        source, left = flat.data_ptr(), flat.nbytes
        while True:
            self._wait(self._free)
            cell = self._cells[self._turn % DEPTH]
            if left == flat.nbytes:
                header = Header(tag, flat.nbytes, DTYPES[dtype])
                copy(cell.address, ctypes.addressof(header), ctypes.sizeof(header))
            length = min(left, CELL_BYTES)
            copy(cell.address + HEADER_BYTES, source, length)
            self._turn += 1
            semaphore.post(self._filled)
            source, left = source + length, left - length
            if left == 0:
                return

    def peek(self) -> tuple[int, int, torch.dtype]:
        """Wait for the next message; its tag, length and dtype. `take` must follow."""
        self._wait(self._filled)
        tag, nbytes, dtype = Header.from_address(self._cells[self._turn % DEPTH].address)
        return tag, nbytes, DTYPE_OF[dtype]

    def take(self, target: int, left: int) -> None:
        """Copy the message to an address."""
        while True:
            length = min(left, CELL_BYTES)
            copy(target, self._cells[self._turn % DEPTH].address + HEADER_BYTES, length)
            self._turn += 1
            semaphore.post(self._free)
            target, left = target + length, left - length
            if left == 0:
                return
            self._wait(self._filled)

    def _wait(self, address: int) -> None:
        self.waits = True
        semaphore.wait(address, self.peer, self.timeout, beside=False)
        self.waits = False


class Outbox:
    """Messages to one rank. The mailbox is opened when the first one is sent."""

    def __init__(self, name: str, open_mailbox: Callable[[], Mailbox]) -> None:
        self.lane, self._open = Lane(name), open_mailbox
        self.mailbox: Mailbox | None = None

    def send(self, flat: Tensor, tag: int, result: list[Tensor]) -> LaneWork:
        def run() -> None:
            self.mailbox = self.mailbox or self._open()
            self.mailbox.send(flat, tag, result[0].dtype)

        return self.lane.submit(run, result)

    @property
    def waits(self) -> bool:
        """A send is blocked: the receiver has not emptied the cells yet."""
        return self.mailbox is not None and self.mailbox.waits


class Inbox:
    """Messages from one rank. The mailbox is opened, on the lane, when the first one is asked for."""

    def __init__(self, name: str, open_mailbox: Callable[[], Mailbox]) -> None:
        self.lane, self._open = Lane(name), open_mailbox
        self.mailbox: Mailbox | None = None
        self._matching = threading.Lock()
        self._asked: dict[int, deque[Receive]] = {}
        self._aside: dict[int, deque[Arrival]] = {}

    def receive(self, flat: Tensor, tag: int, result: list[Tensor]) -> LaneWork:
        """Fill `flat` with the next message of this tag."""
        with self._matching:
            if self._aside.get(tag):
                found = self._aside[tag].popleft()
                check(flat, result[0].dtype, found)
                copy(flat.data_ptr(), found.content.data_ptr(), found.content.nbytes)
                return LaneWork.finished(self.lane, result)
            work = LaneWork(self.lane, self._deliver, result)
            self._asked.setdefault(tag, deque()).append(Receive(flat, result[0].dtype, work))
        return self.lane.enqueue(work)  # as many deliveries are queued as receives are open, in whatever order

    @property
    def waits(self) -> bool:
        """A receive is open."""
        return any(self._asked.values())

    def _deliver(self) -> LaneWork | None:
        """Take messages until one matches an open receive. Returns that receive's work."""
        try:
            self.mailbox = self.mailbox or self._open()
            while True:
                tag, nbytes, dtype = self.mailbox.peek()
                wanted = self._wanted(tag)
                if wanted is not None and (wanted.flat.nbytes, wanted.dtype) == (nbytes, dtype):
                    self.mailbox.take(wanted.flat.data_ptr(), nbytes)
                    return wanted.work
                found = Arrival(tag, dtype, torch.empty(nbytes, dtype=torch.uint8))
                self.mailbox.take(found.content.data_ptr(), nbytes)
                wanted = wanted or self._wanted(tag, found)
                if wanted is not None:
                    deliver(wanted, found)
                    return wanted.work
        except Exception as error:
            self._fail_all(error)
            raise

    def _wanted(self, tag: int, found: "Arrival | None" = None) -> "Receive | None":
        """The oldest open receive of this tag; if there is none, `found` is put aside."""
        with self._matching:
            if self._asked.get(tag):
                return self._asked[tag].popleft()
            if found is not None:
                self._aside.setdefault(tag, deque()).append(found)
            return None

    def _fail_all(self, error: Exception) -> None:
        with self._matching:
            open_receives = [receive.work for asked in self._asked.values() for receive in asked]
            self._asked.clear()
        for work in open_receives:
            work.finish(error)
            work.complete()


def deliver(wanted: Receive, found: Arrival) -> None:
    try:
        check(wanted.flat, wanted.dtype, found)
        copy(wanted.flat.data_ptr(), found.content.data_ptr(), found.content.nbytes)
    except ValueError as error:  # this receive's mistake, not the lane's
        wanted.work.finish(error)


def check(flat: Tensor, dtype: torch.dtype, found: Arrival) -> None:
    sent, wanted = (found.content.nbytes // found.dtype.itemsize, found.dtype), (flat.nbytes // dtype.itemsize, dtype)
    if sent != wanted:
        raise ValueError(
            f"a message of {sent[0]} {sent[1]} elements came with tag {found.tag}, but {wanted[0]} {wanted[1]} are "
            f"received here"
        )
