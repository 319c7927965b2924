"""The board: where each rank shows a chunk to all others. All collectives are made of it.

Every rank owns DEPTH cells, used in turn. A turn goes

    writer   wait until all others have released the cell's last content; copy a chunk in; show it to all others
    reader   wait until it is shown; copy or add from the cell, directly; release it

so a chunk is copied once however many ranks read it, and the cells, used over and over, stay in the cache. With several
cells a rank may be turns ahead of the others. Every turn is read (or released unread) by every other rank, in order:
so each rank knows, without a message, which cell comes next.

A cell has a title: the number of the call of the group that it belongs to, and everything that ranks must agree on for
its bytes to be interpreted correctly. A reader checks the title before it reads the bytes.
"""

import ctypes
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.lane import Lane
from lockstep.comm.shm import semaphore
from lockstep.comm.shm.segment import Segment
from lockstep.comm.shm.semaphore import post, try_wait
from lockstep.errors import PeerError

DEPTH = 2
CELL_BYTES = 2 * 1024 * 1024
"""Large enough that a turn's overhead (some 20 us) is small beside its copy, small enough for the cache."""

copy = ctypes.memmove
"""copy(to, from, nbytes), by address: a tenth of a tensor copy's overhead, and no interpreter lock meanwhile."""


@dataclass(frozen=True)
class Details:
    """What ranks must agree on besides operation, dtype and length."""

    dtype: torch.dtype | None = None
    """The user's dtype, where the tensor is sent as another: complex numbers as pairs of real ones."""
    reduction: str = ""
    root: int = -1
    layout: int = 0
    """Of a tensor that is not in row-major order: in which order its elements are sent."""
    buffer: int = -1
    """The number of the allocation, for shared tensors."""


NO_DETAILS = Details()


class Cell:
    """A piece of shared memory, as an address for copying and as a tensor for adding."""

    def __init__(self, memory: Tensor) -> None:
        self.address = memory.data_ptr()
        self._memory = memory
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def view(self, dtype: torch.dtype, length: int, start: int = 0) -> Tensor:
        """`length` elements from byte `start` on. Cached: a training step uses the same views over and over."""
        key = (start, length, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 256:
                self._views.clear()
            view = self._memory[start : start + length * dtype.itemsize].view(dtype)
            self._views[key] = view
        return view


class Board:
    """One rank's handle on the board of a group."""

    def __init__(
        self,
        segment: Segment,
        rank: int,
        peers: dict[int, semaphore.Peer],
        timeout: float,
        lane: Lane,
    ) -> None:
        """`peers`: all ranks of the group but this one. Its maker has prepared the segment (`prepare_board`)."""
        self._lane = lane
        self.rank, self.size, self.peers, self.timeout = rank, len(peers) + 1, peers, timeout
        self.others = sorted(peers)
        memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        cells = memory[_head_bytes(self.size) :].view(self.size, DEPTH, CELL_BYTES)
        start = 2 * self.size * self.size * semaphore.SIZE
        self._titles = memoryview(segment.memory)[start : start + TITLE.size * self.size * DEPTH]
        self._title = TITLE.pack(0, 0, 0, 0, 0, 0, 0, 0)
        self._calls = 0
        self.waits_for: int | None = None
        """The rank that the call in progress waits for, to show a cell or to release one."""
        self.details = NO_DETAILS
        """The details of the call that begins next."""
        self._cells = [[Cell(cell) for cell in row] for row in cells]
        self._written = 0
        self._read = [0] * self.size
        # Of each pair of ranks: `shown` is posted by the writer, `released` by the reader.
        shown, released = _semaphores(memory, self.size)
        self._to_show = [shown[rank][other] for other in self.others]
        self._shown = {other: shown[other][rank] for other in self.others}
        self._to_release = {other: released[rank][other] for other in self.others}
        self._released = [(released[other][rank], peers[other]) for other in self.others]

    def begin(self, operation: str, nbytes: int = 0, dtype: torch.dtype = torch.uint8) -> None:
        """From here on, every cell shown carries this call's title, and every cell read must have the same.

        Otherwise ranks that call different collectives, or the same one with different arguments, would misread each
        other's bytes.
        """
        details, self.details = self.details, NO_DETAILS
        self._calls += 1
        self._title = TITLE.pack(
            self._calls,
            nbytes,
            details.layout,
            details.buffer,
            OPERATIONS[operation],
            DTYPES[details.dtype or dtype],
            REDUCTIONS.index(details.reduction),
            details.root,
        )

    def take(self) -> Cell:
        """The next of this rank's cells, free to be written."""
        for address, peer in self._released:
            if try_wait(address):
                self._wait(address, peer)
        return self._cells[self.rank][self._written % DEPTH]

    def show(self) -> None:
        """Publish the cell taken last, now written: all ranks, this one too, may read it until the cell's next turn."""
        start = (self.rank * DEPTH + self._written % DEPTH) * TITLE.size
        self._titles[start : start + TITLE.size] = self._title
        self._written += 1
        for address in self._to_show:
            post(address)

    def look(self, writer: int) -> Cell:
        """The writer's next cell, once it is shown."""
        if try_wait(self._shown[writer]):
            self._wait(self._shown[writer], self.peers[writer])
        slot = self._read[writer] % DEPTH
        start = (writer * DEPTH + slot) * TITLE.size
        if self._titles[start : start + TITLE.size] != self._title:
            theirs, ours = bytes(self._titles[start : start + TITLE.size]), self._title
            raise PeerError(
                f"ranks disagree: rank {writer} calls {_in_words(theirs, ours)}, and rank {self.rank} "
                f"{_in_words(ours, theirs)}"
            )
        return self._cells[writer][slot]

    def _wait(self, address: int, peer: semaphore.Peer) -> None:
        self.waits_for = peer.rank
        semaphore.wait(address, peer, self.timeout, self._lane.beside)
        self.waits_for = None

    def release(self, writer: int) -> None:
        """Release the cell that was read last."""
        self._read[writer] += 1
        post(self._to_release[writer])

    @property
    def last_call(self) -> tuple[int, str]:
        """The number of the last call, and a description."""
        return self._calls, _what(self._title)


TITLE = struct.Struct("<qqqqhhhh")
"""Number of the call, bytes, layout, shared buffer; operation, dtype, reduction, root."""
_OPERATIONS = (
    *("barrier", "all_reduce", "all_reduce in shared memory", "reduce", "reduce_scatter"),
    *("all_gather", "broadcast", "scatter", "all_to_all"),
    *("reduce_scatter in shared memory", "all_gather in shared memory"),
)
REDUCTIONS = ("", "SUM", "AVG", "PRODUCT", "MAX", "MIN", "BAND", "BOR", "BXOR")
_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(getattr(torch, name) for name in dir(torch) if name.startswith("float8_")),
)
OPERATIONS = {name: number for number, name in enumerate(_OPERATIONS)}
DTYPES = {dtype: number for number, dtype in enumerate(_DTYPES)}


def _what(title: bytes) -> str:
    _, nbytes, _, _, operation, dtype, _, _ = TITLE.unpack(title)
    kind = _DTYPES[dtype]
    return f"{_OPERATIONS[operation]} of {nbytes // kind.itemsize:,} {str(kind).removeprefix('torch.')}"


def _in_words(title: bytes, other: bytes) -> str:
    """A title in words: what was called, and of the other fields those that differ from the other title."""
    number, _, layout, buffer, _, _, reduction, root = TITLE.unpack(title)
    theirs = TITLE.unpack(other)
    words = f"{_what(title)} elements"
    if reduction != theirs[6]:
        words += f" by {REDUCTIONS[reduction] or 'no reduction'}"
    if root != theirs[7]:
        words += f" with root {root}" if root >= 0 else " without a root"
    if layout != theirs[2]:
        words += " in another order of strides" if layout else " in row-major order"
    if buffer != theirs[3]:
        words += f" in shared buffer {buffer}"
    return words + (f" (call {number} of the group)" if number != theirs[0] else "")


def _semaphores(memory: Tensor, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses of the semaphores, by [poster][waiter]: those for `shown`, and those for `released`."""
    first, ranks = memory.data_ptr(), range(size)

    def table(kind: int) -> list[list[int]]:
        return [
            [first + ((kind * size + poster) * size + waiter) * semaphore.SIZE for waiter in ranks] for poster in ranks
        ]

    return table(0), table(1)


def prepare_board(segment: Segment, size: int) -> None:
    """Initialize the semaphores before another rank can see them: an early rank's post would be overwritten here."""
    shown, released = _semaphores(torch.frombuffer(segment.memory, dtype=torch.uint8), size)
    for kind, value in ((shown, 0), (released, DEPTH)):
        for row in kind:
            for address in row:
                semaphore.initialize(address, value)


def _head_bytes(size: int) -> int:
    """Semaphores and titles, up to where a page of memory begins."""
    return -(-(2 * size * size * semaphore.SIZE + TITLE.size * size * DEPTH) // 4096) * 4096


def board_bytes(size: int) -> int:
    return _head_bytes(size) + size * DEPTH * CELL_BYTES
