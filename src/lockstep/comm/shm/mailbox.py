"""The mailbox: where one rank hands messages to one other, in order. Send and receive are made of it.

A message is a header (tag, bytes) and as many cells as it needs. The receiver looks for a tag; what comes before it
is put aside for whoever asks for that one later.
"""

import ctypes

import torch
from torch import Tensor

from lockstep.comm.shm import semaphore
from lockstep.comm.shm.board import Cell, copy
from lockstep.comm.shm.segment import Segment

DEPTH = 2
CELL_BYTES = 512 * 1024
HEADER_BYTES = 64
MAILBOX_BYTES = 2 * semaphore.SIZE + DEPTH * (HEADER_BYTES + CELL_BYTES)


class Mailbox:
    """One end of the way from one rank to another; `peer` is the other end."""

    def __init__(self, segment: Segment, peer: semaphore.Peer, timeout: float) -> None:
        self.peer, self.timeout = peer, timeout
        self._segment = segment  # its name goes when it goes, and the other end may not have opened it yet
        memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._filled, self._free = memory.data_ptr(), memory.data_ptr() + semaphore.SIZE
        cells = memory[2 * semaphore.SIZE :].view(DEPTH, HEADER_BYTES + CELL_BYTES)
        self._cells = [Cell(cell) for cell in cells]
        self._turn = 0
        self._aside: dict[int, list[Tensor]] = {}

    def initialize(self) -> None:
        semaphore.initialize(self._filled, 0)
        semaphore.initialize(self._free, DEPTH)

    def send(self, flat: Tensor, tag: int) -> None:
        """Returns once the whole message is in shared memory, or as much of it as the receiver left no room for."""
        source, left = flat.data_ptr(), flat.nbytes
        while True:
            semaphore.wait(self._free, self.peer, self.timeout, beside=False)
            cell = self._cells[self._turn % DEPTH]
            if left == flat.nbytes:
                header = (ctypes.c_int64 * 2)(tag, flat.nbytes)
                copy(cell.address, ctypes.addressof(header), ctypes.sizeof(header))
            length = min(left, CELL_BYTES)
            copy(cell.address + HEADER_BYTES, source, length)
            self._turn += 1
            semaphore.post(self._filled)
            source, left = source + length, left - length
            if left == 0:
                return

    def receive(self, flat: Tensor, tag: int) -> None:
        """Fill `flat` with the next message of this tag."""
        if self._aside.get(tag):
            found = self._aside[tag].pop(0)
            _check_length(flat.nbytes, found.nbytes, self.peer.rank, tag)
            copy(flat.data_ptr(), found.data_ptr(), found.nbytes)
            return
        while True:
            cell_tag, nbytes = self._peek()
            if cell_tag == tag:
                _check_length(flat.nbytes, nbytes, self.peer.rank, tag)
                self._take(flat.data_ptr(), nbytes)
                return
            other = torch.empty(nbytes, dtype=torch.uint8)
            self._take(other.data_ptr(), nbytes)
            self._aside.setdefault(cell_tag, []).append(other)

    def _peek(self) -> tuple[int, int]:
        """Wait for the next message; its tag and length. `_take` must follow."""
        semaphore.wait(self._filled, self.peer, self.timeout, beside=False)
        tag, nbytes = (ctypes.c_int64 * 2).from_address(self._cells[self._turn % DEPTH].address)
        return tag, nbytes

    def _take(self, target: int, left: int) -> None:
        while True:
            length = min(left, CELL_BYTES)
            copy(target, self._cells[self._turn % DEPTH].address + HEADER_BYTES, length)
            self._turn += 1
            semaphore.post(self._free)
            target, left = target + length, left - length
            if left == 0:
                return
            semaphore.wait(self._filled, self.peer, self.timeout, beside=False)


def _check_length(wanted: int, found: int, rank: int, tag: int) -> None:
    if wanted != found:
        raise ValueError(f"rank {rank} sent {found} bytes with tag {tag}, but {wanted} are received here")
