"""The shm backend as a torch.distributed process group in Python, which PyTorch's engines use unchanged.

Collectives of a group run in order on one lane; each direction between two ranks has a lane of its own, so that a
send can wait for its receiver while a receive proceeds. A synchronous call runs on the caller's thread.
"""

# torch's stub overloads each method for callers' comfort; an engine calls the one form that we write.
# mypy: disable-error-code="override, assignment, call-arg"

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.lane import Lane, LaneWork
from lockstep.comm.reduction import reduction, reduction_name
from lockstep.comm.shm import memory, operations
from lockstep.comm.shm.board import Board, Details, board_bytes, prepare_board
from lockstep.comm.shm.mailbox import Inbox, Mailbox, Outbox
from lockstep.comm.shm.rendezvous import Rendezvous
from lockstep.comm.shm.segment import Segment
from lockstep.comm.shm.shared import SharedTensors, shared_bytes
from lockstep.errors import UserError
from lockstep.launch.calls import Call, called, groups_by_name, sources


class ShmGroup(dist.ProcessGroup):
    """A process group of ranks that share one machine's memory."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name, self._description = rank, size, name, called("default_pg")
        self._collectives = Lane(f"shm group {name}")
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._opening = threading.Lock()
        self._shared = SharedTensors()
        self._rendezvous = Rendezvous(store, rank, size, timeout.total_seconds())
        self._board: Board | None = self._open_board()
        if size > 1:
            sources.add(self)

    def _open_board(self) -> Board:
        rendezvous = self._rendezvous
        if self._size == 1:
            return Board(Segment.private(board_bytes(1)), 0, {}, rendezvous.timeout, self._collectives)
        segment = rendezvous.make_segment(board_bytes(self._size), partial(prepare_board, size=self._size))
        board = Board(segment, self._rank, rendezvous.peers, rendezvous.timeout, self._collectives)
        operations.barrier(board)
        rendezvous.forget(segment)
        return board

    def shared_empty(self, length: int, dtype: torch.dtype) -> Tensor | None:
        """A tensor that all-reduces without being copied; all ranks must call this together. None: there is no room."""
        if self._size == 1 or length == 0:
            return None
        try:
            segment = self._rendezvous.make_segment(shared_bytes(self._size, length * dtype.itemsize))
        except UserError:  # a small /dev/shm, as containers have: ordinary memory works too, at the cost of a copy
            return None
        self.barrier().wait()
        self._rendezvous.forget(segment)
        return self._shared.add(segment, self._rank, self._size, length, dtype)

    def calls(self) -> list[Call]:
        """The last collective, and the sends and receives that are pending."""
        ranks, found = groups_by_name().get(self._name, tuple(range(self._size))), []
        if self._board is not None and self._board.last_call[0]:
            (number, what), peer = self._board.last_call, self._board.waits_for
            waits_for = None if peer is None else ranks[peer]
            found.append(Call(self._description, ranks, number, what, peer is None, waits_for))
        waiting = [(f"send to rank {ranks[to]}", to) for to, box in self._outboxes.items() if box.waits]
        waiting += [(f"receive from rank {ranks[at]}", at) for at, box in self._inboxes.items() if box.waits]
        return found + [Call(self._description, ranks, 0, what, False, ranks[peer]) for what, peer in waiting]

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
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = called(description)

    def set_timeout(self, timeout: timedelta) -> None:
        waiting: list[Rendezvous | Board | Mailbox | None] = [self._rendezvous, self._board]
        waiting += [box.mailbox for box in self._boxes()]
        for one in waiting:
            if one is not None:
                one.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Called by destroy_process_group. Finishes what was asked for."""
        ended = [lane.close() for lane in (self._collectives, *(box.lane for box in self._boxes()))]
        for outbox in self._outboxes.values():
            if outbox.mailbox is not None:
                self._rendezvous.await_opening(outbox.mailbox)
        self._board = None
        self._outboxes.clear()
        self._inboxes.clear()
        if all(ended):  # else a lane still watches the other ranks
            self._rendezvous.close()

    def _boxes(self) -> list[Outbox | Inbox]:
        return [*self._outboxes.values(), *self._inboxes.values()]

    def abort(self) -> None:
        self.shutdown()

    # ---- collectives -------------------------------------------------------------------------------------

    def _submit(self, run: Callable[[Board], None], result: list[Tensor], opts: Any) -> dist.Work:
        board = self._board
        if board is None:
            raise RuntimeError("this shm group has been destroyed")
        if not getattr(opts, "asyncOp", True):
            self._collectives.do(run, board)
            return LaneWork.finished(self._collectives, result)
        return self._collectives.submit(lambda: run(board), result)

    def _details(self, tensor: Tensor, op: Any = None, root: int = -1) -> Details:
        """What all ranks must agree on in this call."""
        name = "" if op is None else reduction_name(op)
        return Details(memory.own_dtype(tensor), name, root, memory.layout(tensor))

    def _in_buffer(self, details: Details, everyone: list[Tensor] | None) -> Details:
        return details if everyone is None else replace(details, buffer=self._shared.number(everyone, self._rank))

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self._size:
            raise ValueError(f"the root is rank {root}, but this group has ranks 0 to {self._size - 1}")

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = dist.AllreduceOptions() if opts is None else opts
        flats = [memory.flat(t, any_order=True) for t in tensors]
        reductions = [reduction(opts.reduceOp, t.dtype) for t in tensors]
        details = [self._details(t, opts.reduceOp) for t in tensors]

        def run(board: Board) -> None:
            for flat, (combine, average), detail in zip(flats, reductions, details, strict=True):
                if flat.numel():
                    everyone = self._shared.find(flat) if self._shared else None
                    board.details = self._in_buffer(detail, everyone)
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
        flats = [memory.flat(t, any_order=True) for t in tensors]
        combine, average = reduction(opts.reduceOp, tensors[0].dtype)
        details = [self._details(t, opts.reduceOp, opts.rootRank) for t in tensors]

        def run(board: Board) -> None:
            for flat, board.details in zip(flats, details, strict=True):
                operations.reduce(board, flat, opts.rootRank, combine)
                if average and self._rank == opts.rootRank:
                    flat.div_(self._size)

        return self._submit(run, list(tensors), opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        opts = opts or dist.BroadcastOptions()
        self._check_root(opts.rootRank)
        flats = [memory.flat(t, any_order=True) for t in tensors]
        details = [self._details(t, root=opts.rootRank) for t in tensors]

        def run(board: Board) -> None:
            for flat, board.details in zip(flats, details, strict=True):
                operations.broadcast(board, flat, opts.rootRank)

        return self._submit(run, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._all_gather([[memory.flat(t) for t in o] for o in outputs], inputs, outputs[0], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        # outputs[rank][i] belongs to inputs[i]
        by_input = [[memory.flat(row[i]) for row in outputs] for i in range(len(inputs))]
        return self._all_gather(by_input, inputs, [t for row in outputs for t in row], opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._all_gather([memory.flat(o).chunk(self._size) for o in outputs], inputs, outputs, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        everyone = self._shared_parts(memory.flat(output), memory.flat(input)) if self._shared else None
        if everyone is None:
            return self.allgather_into_tensor_coalesced([output], [input], opts)
        parts = memory.flat(output).chunk(self._size)
        memory.check_parts("all_gather", parts, everyone[0], self._size)
        whole = self._shared.find(memory.flat(output)) or everyone

        def run(board: Board) -> None:
            board.details = self._in_buffer(self._details(input), whole)
            operations.all_gather_shared(board, everyone, parts)

        return self._submit(run, [output], opts)

    def _shared_parts(self, output: Tensor, part: Tensor) -> list[Tensor] | None:
        """All ranks' parts, if they are in shared memory: as tensors of their own, or in place in a shared output."""
        everyone = self._shared.find(output)
        if everyone is None:
            return self._shared.find(part)
        parts = [tensor.chunk(self._size)[rank] for rank, tensor in enumerate(everyone)]
        return parts if parts[self._rank].data_ptr() == part.data_ptr() else None

    def _all_gather(self, outputs: Any, inputs: Any, result: Any, opts: Any) -> dist.Work:
        flats = [memory.flat(t) for t in inputs]
        for flat, parts in zip(flats, outputs, strict=True):
            if flat.numel():
                memory.check_parts("all_gather", parts, flat, self._size)

        details = [self._details(t) for t in inputs]

        def run(board: Board) -> None:
            for flat, parts, board.details in zip(flats, outputs, details, strict=True):
                if flat.numel():
                    operations.all_gather(board, flat, parts)

        return self._submit(run, list(result), opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._reduce_scatter(outputs, [[memory.flat(t) for t in i] for i in inputs], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._reduce_scatter(outputs, [memory.flat(i).chunk(self._size) for i in inputs], opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        everyone = self._shared.find(memory.flat(input), beginning=True) if self._shared else None
        combine, average = reduction(opts.reduceOp if opts else dist.ReduceOp.SUM, output.dtype)
        if everyone is None or average:
            return self.reduce_scatter_tensor_coalesced([output], [input], opts)
        flat = memory.flat(output)
        memory.check_parts("reduce_scatter", everyone[0].chunk(self._size), flat, self._size)
        detail = self._in_buffer(self._details(input, opts.reduceOp if opts else dist.ReduceOp.SUM), everyone)

        def run(board: Board) -> None:
            board.details = detail
            operations.reduce_scatter_shared(board, everyone, flat, combine)

        return self._submit(run, [output], opts)

    def _reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        flats = [memory.flat(t) for t in outputs]
        combine, average = reduction(opts.reduceOp, outputs[0].dtype)
        for flat, parts in zip(flats, inputs, strict=True):
            if flat.numel():
                memory.check_parts("reduce_scatter", parts, flat, self._size)

        details = [self._details(t, opts.reduceOp) for t in outputs]

        def run(board: Board) -> None:
            for flat, parts, board.details in zip(flats, inputs, details, strict=True):
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
        flat = memory.flat(inputs[0])
        parts = [memory.flat(t) for t in outputs[0]] if self._rank == opts.rootRank else None
        if parts is not None:
            memory.check_parts("gather", parts, flat, self._size)
        detail = self._details(inputs[0], root=opts.rootRank)

        def run(board: Board) -> None:
            board.details = detail
            operations.all_gather(board, flat, parts)

        return self._submit(run, list(outputs[0]) if parts else [], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        self._check_root(opts.rootRank)
        flat = memory.flat(outputs[0])
        parts = [memory.flat(t) for t in inputs[0]] if self._rank == opts.rootRank else None
        if parts is not None:
            memory.check_parts("scatter", parts, flat, self._size)
        detail = self._details(outputs[0], root=opts.rootRank)

        def run(board: Board) -> None:
            board.details = detail
            operations.scatter(board, flat, parts, opts.rootRank)

        return self._submit(run, list(outputs), opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        flats = [memory.flat(t) for t in outputs]
        return self._all_to_all(flats, [memory.flat(t) for t in inputs], list(outputs), opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        outputs = memory.rows(output, output_splits, self._size)
        return self._all_to_all(outputs, memory.rows(input, input_splits, self._size), [output], opts)

    all_to_all_single = alltoall_base

    def _all_to_all(self, outputs: Any, inputs: Any, result: list[Tensor], opts: Any) -> dist.Work:
        memory.check_lists(inputs, outputs, self._size)
        return self._submit(lambda board: operations.all_to_all(board, inputs, outputs), result, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._submit(operations.barrier, [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    # ---- send and receive --------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> dist.Work:
        with self._opening:
            if destination not in self._outboxes:
                opener = partial(self._rendezvous.make_mailbox, self._rendezvous.peer(destination))
                self._outboxes[destination] = Outbox(f"shm group {self._name}, to rank {destination}", opener)
        return self._outboxes[destination].send(memory.flat(tensors[0]), tag, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        with self._opening:
            if source not in self._inboxes:
                opener = partial(self._rendezvous.find_mailbox, self._rendezvous.peer(source))
                self._inboxes[source] = Inbox(f"shm group {self._name}, from rank {source}", opener)
        return self._inboxes[source].receive(memory.flat(tensors[0]), tag, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        raise ValueError("the shm backend receives from a rank that is named: give src to recv")
