"""The face of the shm backend: a torch.distributed process group in Python, which PyTorch's engines use unchanged.

Collectives of a group run in order on one lane; each direction between two ranks has a lane of its own, so that a
send can wait for its receiver while a receive goes on. A synchronous call is done by the caller itself.
"""

# torch's stub overloads each method for callers' comfort; an engine calls the one form that we write.
# mypy: disable-error-code="override, assignment, call-arg"

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.lane import Lane, LaneWork
from lockstep.comm.reduction import reduction
from lockstep.comm.shm import operations
from lockstep.comm.shm.board import Board, board_bytes
from lockstep.comm.shm.mailbox import MAILBOX_BYTES, Inbox, Mailbox, Outbox
from lockstep.comm.shm.segment import Segment, process_namespace
from lockstep.comm.shm.semaphore import Peer, PeerError
from lockstep.comm.shm.shared import SharedTensors, shared_bytes
from lockstep.errors import UserError


class ShmGroup(dist.ProcessGroup):
    """A process group of ranks that share one machine's memory."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store, self._name = rank, size, store, name
        self._timeout = timeout.total_seconds()
        self._collectives = Lane(f"shm group {name}")
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._peers: dict[int, Peer] = {}
        self._opening = threading.Lock()
        self._shared = SharedTensors()
        self._allocations = 0
        self._board: Board | None = None
        if size > 1:
            self._meet()

    def _meet(self) -> None:
        """Learn each other's processes; the first rank makes the board, the others open it, then its name goes."""
        self._store.set(f"process/{self._rank}", f"{_host()} {os.getpid()}")
        everyone = [self._store.get(f"process/{rank}").decode().split() for rank in range(self._size)]
        for rank, (host, _) in enumerate(everyone):
            if host != everyone[0][0]:
                raise UserError(
                    f"the shm backend joins ranks of one machine, but ranks 0 and {rank} of this group are on "
                    f"different ones (or in different containers); use --backend gloo"
                )
        self._peers = {r: Peer(r, int(pid)) for r, (_, pid) in enumerate(everyone) if r != self._rank}
        if self._rank == 0:
            try:
                segment = Segment.create(board_bytes(self._size))
            except UserError:
                self._store.set("board", "none")
                raise
            self._board = Board(segment, self._rank, self._peers, self._timeout, self._collectives)
            self._board.initialize()
            self._store.set("board", segment.name)
        else:
            name = self._store.get("board").decode()
            if name == "none":
                raise UserError("shared memory: rank 0 found no room in /dev/shm")
            segment = Segment.open(name)
            self._board = Board(segment, self._rank, self._peers, self._timeout, self._collectives)
        operations.barrier(self._board)
        segment.forget_name()
        if self._rank == 0:  # a store that outlives this group must not lead a later one here
            self._store.delete_key("board")
        self._store.delete_key(f"process/{self._rank}")

    def shared_empty(self, length: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor that all-reduces without being copied; all ranks make theirs together. None: there is no room."""
        if self._board is None or length == 0:
            return None
        key = f"shared/{self._allocations}"
        self._allocations += 1
        if self._rank == 0:
            try:
                segment = Segment.create(shared_bytes(self._size, length * dtype.itemsize))
            except UserError:  # a small /dev/shm, as containers have: ordinary memory does as well, at a copy
                self._store.set(key, "none")
                return None
            self._store.set(key, segment.name)
        else:
            name = self._store.get(key).decode()
            if name == "none":
                return None
            segment = Segment.open(name)
        self.barrier().wait()
        segment.forget_name()
        return self._shared.add(segment, self._rank, self._size, length, dtype)

    # ---- what torch asks of a group ---------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "shm"

    def name(self) -> str:
        return "shm"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._name

    def _set_group_desc(self, description: str) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()
        if self._board is not None:
            self._board.timeout = self._timeout
        for box in self._boxes():
            if box.mailbox is not None:
                box.mailbox.timeout = self._timeout

    def shutdown(self) -> None:
        """Called by destroy_process_group. Finishes what was asked for."""
        ended = [lane.close() for lane in (self._collectives, *(box.lane for box in self._boxes()))]
        for outbox in self._outboxes.values():
            self._await_opening(outbox)
        self._board = None
        self._outboxes.clear()
        self._inboxes.clear()
        if all(ended):  # else a lane still watches them
            for peer in self._peers.values():
                peer.close()
        self._peers.clear()

    def _boxes(self) -> list[Outbox | Inbox]:
        return [*self._outboxes.values(), *self._inboxes.values()]

    def _await_opening(self, outbox: Outbox) -> None:
        """What was sent must not be lost because its receiver has not looked yet."""
        mailbox, deadline = outbox.mailbox, time.monotonic() + self._timeout
        while mailbox is not None and mailbox.segment.is_named() and time.monotonic() < deadline:
            if mailbox.peer.has_ended():
                return
            time.sleep(0.005)

    def abort(self) -> None:
        self.shutdown()

    # ---- collectives -------------------------------------------------------------------------------------

    def _submit(self, run: Callable[[Board], None], result: list[Tensor], opts: Any) -> dist.Work:
        board = self._board
        if board is None:
            if self._size > 1:
                raise RuntimeError("this shm group has been destroyed")
            return LaneWork.finished(self._collectives, result)
        if not getattr(opts, "asyncOp", True):
            self._collectives.do(run, board)
            return LaneWork.finished(self._collectives, result)
        return self._collectives.submit(lambda: run(board), result)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self._size:
            raise ValueError(f"the root is rank {root}, but this group has ranks 0 to {self._size - 1}")

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = dist.AllreduceOptions() if opts is None else opts
        flats = [_flat(t, any_order=True) for t in tensors]
        reductions = [reduction(opts.reduceOp, t.dtype) for t in tensors]

        def run(board: Board) -> None:
            for flat, (combine, average) in zip(flats, reductions, strict=True):
                if flat.numel():
                    everyone = self._shared.find(flat) if self._shared else None
                    if everyone is not None:
                        operations.all_reduce_shared(board, everyone, combine)
                    else:
                        operations.all_reduce(board, flat, combine)
                    if average:
                        flat.div_(self._size)

        return self._submit(run, tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts or dist.AllreduceCoalescedOptions())

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        self._check_root(opts.rootRank)
        flats = [_flat(t, any_order=True) for t in tensors]
        combine, average = reduction(opts.reduceOp, tensors[0].dtype)

        def run(board: Board) -> None:
            for flat in flats:
                operations.reduce(board, flat, opts.rootRank, combine)
                if average and self._rank == opts.rootRank:
                    flat.div_(self._size)

        return self._submit(run, list(tensors), opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        opts = opts or dist.BroadcastOptions()
        self._check_root(opts.rootRank)
        flats = [_flat(t, any_order=True) for t in tensors]

        def run(board: Board) -> None:
            for flat in flats:
                operations.broadcast(board, flat, opts.rootRank)

        return self._submit(run, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._all_gather([[_flat(t) for t in o] for o in outputs], inputs, outputs[0], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        # outputs[rank][i] belongs to inputs[i]
        by_input = [[_flat(row[i]) for row in outputs] for i in range(len(inputs))]
        return self._all_gather(by_input, inputs, [t for row in outputs for t in row], opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._all_gather([_flat(o).chunk(self._size) for o in outputs], inputs, outputs, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def _all_gather(self, outputs: Any, inputs: Any, result: Any, opts: Any) -> dist.Work:
        flats = [_flat(t) for t in inputs]
        for flat, parts in zip(flats, outputs, strict=True):
            if flat.numel():
                _check_parts("all_gather", parts, flat, self._size)
        if self._size == 1:
            for flat, parts in zip(flats, outputs, strict=True):
                parts[0].copy_(flat)

        def run(board: Board) -> None:
            for flat, parts in zip(flats, outputs, strict=True):
                if flat.numel():
                    operations.all_gather(board, flat, parts)

        return self._submit(run, list(result), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._reduce_scatter(outputs, [[_flat(t) for t in i] for i in inputs], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._reduce_scatter(outputs, [_flat(i).chunk(self._size) for i in inputs], opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def _reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        flats = [_flat(t) for t in outputs]
        combine, average = reduction(opts.reduceOp, outputs[0].dtype)
        for flat, parts in zip(flats, inputs, strict=True):
            if flat.numel():
                _check_parts("reduce_scatter", parts, flat, self._size)
        if self._size == 1:
            for flat, parts in zip(flats, inputs, strict=True):
                flat.copy_(parts[0])

        def run(board: Board) -> None:
            for flat, parts in zip(flats, inputs, strict=True):
                if flat.numel():
                    operations.reduce_scatter(board, parts, flat, combine)
                    if average:
                        flat.div_(self._size)

        return self._submit(run, list(outputs), opts)

    # torch 2.13's names for the same.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        self._check_root(opts.rootRank)
        flat = _flat(inputs[0])
        parts = [_flat(t) for t in outputs[0]] if self._rank == opts.rootRank else None
        if parts is not None:
            _check_parts("gather", parts, flat, self._size)
            if self._size == 1:
                parts[0].copy_(flat)
        return self._submit(
            lambda board: operations.all_gather(board, flat, parts), list(outputs[0]) if parts else [], opts
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        self._check_root(opts.rootRank)
        flat = _flat(outputs[0])
        parts = [_flat(t) for t in inputs[0]] if self._rank == opts.rootRank else None
        if parts is not None:
            _check_parts("scatter", parts, flat, self._size)
            if self._size == 1:
                flat.copy_(parts[0])
        return self._submit(lambda board: operations.scatter(board, flat, parts, opts.rootRank), list(outputs), opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._all_to_all([_flat(t) for t in outputs], [_flat(t) for t in inputs], list(outputs), opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        outputs = _rows(output, output_splits, self._size)
        return self._all_to_all(outputs, _rows(input, input_splits, self._size), [output], opts)

    all_to_all_single = alltoall_base

    def _all_to_all(self, outputs: Any, inputs: Any, result: list[Tensor], opts: Any) -> dist.Work:
        if self._size == 1:
            outputs[0].copy_(inputs[0])
        return self._submit(lambda board: operations.all_to_all(board, inputs, outputs), result, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._submit(operations.barrier, [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # ---- send and receive --------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> dist.Work:
        with self._opening:
            if destination not in self._outboxes:
                opener = partial(self._make_mailbox, self._peer(destination))
                self._outboxes[destination] = Outbox(f"shm group {self._name}, to rank {destination}", opener)
        return self._outboxes[destination].send(_flat(tensors[0]), tag, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        with self._opening:
            if source not in self._inboxes:
                opener = partial(self._find_mailbox, self._peer(source))
                self._inboxes[source] = Inbox(f"shm group {self._name}, from rank {source}", opener)
        return self._inboxes[source].receive(_flat(tensors[0]), tag, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        raise ValueError("the shm backend receives from a rank that is named: give src to recv")

    def _peer(self, other: int) -> Peer:
        if other not in self._peers:
            raise ValueError(f"rank {self._rank} of {self._size} cannot send to or receive from rank {other}")
        return self._peers[other]

    def _make_mailbox(self, peer: Peer) -> Mailbox:
        """The sender makes it, at its first message."""
        segment = Segment.create(MAILBOX_BYTES)
        mailbox = Mailbox(segment, peer, self._timeout)
        mailbox.initialize()
        self._store.set(f"mailbox/{self._rank}/{peer.rank}", segment.name)
        return mailbox

    def _find_mailbox(self, peer: Peer) -> Mailbox:
        """The receiver looks for it: a sender may come late, or never."""
        key, deadline = f"mailbox/{peer.rank}/{self._rank}", time.monotonic() + self._timeout
        while not self._store.check([key]):
            if peer.has_ended():
                raise PeerError(f"rank {peer.rank} (process {peer.pid}) has ended, and this rank waits for it")
            if time.monotonic() > deadline:
                raise PeerError(f"rank {peer.rank} (process {peer.pid}) did not answer within {self._timeout:g} s")
            time.sleep(0.001)
        segment = Segment.open(self._store.get(key).decode())
        segment.forget_name()
        self._store.delete_key(key)
        return Mailbox(segment, peer, self._timeout)


def _host() -> str:
    """Equal for processes that can share memory and see each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{process_namespace()}/{os.stat('/dev/shm').st_dev}"


def _flat(tensor: Tensor, any_order: bool = False) -> Tensor:
    """All elements in a row, sharing the tensor's memory but not its history in autograd.

    `any_order`: in the order in which they lie in memory, which all ranks have in common (channels-last, transposed).
    """
    if not tensor.is_cpu:
        raise ValueError(f"the shm backend moves CPU tensors, and this one is on {tensor.device}; use nccl or gloo")
    if tensor.layout != torch.strided:
        raise ValueError("the shm backend moves dense tensors, and this one is sparse; use --backend gloo")
    if tensor.is_contiguous():
        flat = tensor.data if tensor.dim() == 1 else tensor.data.view(-1)
    elif any_order and _is_dense(tensor):
        flat = tensor.data.as_strided((tensor.numel(),), (1,))
    else:
        raise ValueError("the shm backend moves contiguous tensors; call .contiguous() first")
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= length
    return True


def _rows(tensor: Tensor, splits: list[int], size: int) -> Sequence[Tensor]:
    """The tensor cut along its first dimension: evenly, or as told."""
    if not splits:
        if tensor.numel() and tensor.size(0) % size:
            raise ValueError(f"all_to_all: {tensor.size(0)} rows do not divide among {size} ranks; give split sizes")
        return _flat(tensor).chunk(size) if tensor.numel() else [_flat(tensor)] * size
    return [_flat(part) for part in tensor.split(list(splits))]


def _check_parts(operation: str, parts: Sequence[Tensor], whole: Tensor, size: int) -> None:
    if [p.numel() for p in parts] != [whole.numel()] * size or any(p.dtype != whole.dtype for p in parts):
        raise ValueError(
            f"{operation} over {size} ranks needs {size} tensors of {whole.numel()} {whole.dtype} elements each, "
            f"but got {[p.numel() for p in parts]} of {sorted({str(p.dtype) for p in parts})}"
        )
