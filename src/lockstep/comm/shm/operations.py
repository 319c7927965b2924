"""Every collective, over the board. Tensors are flat and contiguous; n is the number of ranks.

A large tensor goes chunk by chunk, and each rank shows its next chunk before it reads the others' last one, so that
there is always something to do while others are not ready.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lockstep.comm.reduction import Combine
from lockstep.comm.shm.board import CELL_BYTES, Board, Cell, copy
from lockstep.errors import PeerError

DIRECT_BYTES = 64 * 1024
"""Up to here, more than two ranks each add up everything themselves: more work, but half the waiting."""


def all_reduce(board: Board, flat: Tensor, combine: Combine) -> None:
    """Combine in place. Cost per rank and byte: two ranks, copy 1 + add 1; more, copy (2n - 1)/n + add (n - 1)/n."""
    board.begin("all_reduce", flat.nbytes, flat.dtype)
    if board.size == 1:
        return
    if board.size == 2 or flat.nbytes <= DIRECT_BYTES:
        _all_reduce_direct(board, flat, combine)
    else:
        _all_reduce_in_parts(board, flat, combine)


def _chunks(flat: Tensor, nbytes: int) -> Sequence[Tensor]:
    return (flat,) if flat.nbytes <= nbytes else flat.split(nbytes // flat.itemsize)


def _all_reduce_direct(board: Board, flat: Tensor, combine: Combine, wanted: bool = True) -> None:
    """Every rank shows its whole tensor, and each that wants the sum adds in rank order: the same bits everywhere."""
    dtype, others, chunks = flat.dtype, board.others, _chunks(flat, CELL_BYTES)
    own = _show(board, chunks[0])
    for number, chunk in enumerate(chunks):
        length, mine = chunk.numel(), own
        if number + 1 < len(chunks):
            own = _show(board, chunks[number + 1])
        if board.size == 2:
            theirs = board.look(others[0])
            if wanted:
                combine(chunk, theirs.view(dtype, length), out=chunk)
        else:
            cells = [mine if rank == board.rank else board.look(rank) for rank in range(board.size)]
            if wanted:
                combine(cells[0].view(dtype, length), cells[1].view(dtype, length), out=chunk)
                for cell in cells[2:]:
                    combine(chunk, cell.view(dtype, length), out=chunk)
        for other in others:
            board.release(other)


def _show(board: Board, chunk: Tensor) -> Cell:
    cell = board.take()
    copy(cell.address, chunk.data_ptr(), chunk.nbytes)
    board.show()
    return cell


def _all_reduce_in_parts(board: Board, flat: Tensor, combine: Combine) -> None:
    """Reduce-scatter, then all-gather, chunk by chunk: rank r adds up the r-th part of each chunk.

    turns of each rank: parts 0, parts 1, sum 0, parts 2, sum 1, ...
    """
    chunks = [_cut(chunk, board) for chunk in _chunks(flat, board.size * _part_bytes(board))]
    _show_parts(board, chunks[0][0])
    _add_part(board, chunks[0][1], combine)
    for number, (parts, mine) in enumerate(chunks):
        following = chunks[number + 1] if number + 1 < len(chunks) else None
        if following is not None:
            _show_parts(board, following[0])
        _show(board, mine)
        if following is not None:
            _add_part(board, following[1], combine)
        for other in board.others:
            address, nbytes = parts[other]
            copy(address, board.look(other).address, nbytes)
            board.release(other)


Place = tuple[int, int]
"""An address and a number of bytes. Tensors are made only for what is added."""


def _cut(chunk: Tensor, board: Board) -> tuple[list[Place], Tensor]:
    """The chunk as one part per rank, some of them perhaps empty; and this rank's part as a tensor."""
    address, length, size, itemsize = chunk.data_ptr(), chunk.numel(), board.size, chunk.itemsize
    cuts = [length * rank // size for rank in range(size + 1)]
    places = [(address + start * itemsize, (end - start) * itemsize) for start, end in pairwise(cuts)]
    return places, chunk[cuts[board.rank] : cuts[board.rank + 1]]


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.nbytes


def _part_bytes(board: Board) -> int:
    """A cell cut into one part per rank, whole elements of any dtype."""
    return CELL_BYTES // board.size // 16 * 16


def _show_parts(board: Board, parts: Sequence[Place]) -> None:
    """Copy part r to where rank r reads it; this rank's own part is not copied."""
    cell, stride = board.take().address, _part_bytes(board)
    for other in board.others:
        address, nbytes = parts[other]
        copy(cell + other * stride, address, nbytes)
    board.show()


def _add_part(board: Board, mine: Tensor, combine: Combine) -> None:
    """Add all ranks' parts for this rank to its own."""
    dtype, length, start = mine.dtype, mine.numel(), board.rank * _part_bytes(board)
    for other in board.others:
        combine(mine, board.look(other).view(dtype, length, start), out=mine)
        board.release(other)


SHARED_CHUNK_BYTES = 1024 * 1024
"""So small that a chunk's sum is still in the cache when it is written to the others."""


def all_reduce_shared(board: Board, everyone: Sequence[Tensor], combine: Combine) -> None:
    """Combine tensors that all ranks can see, each in place. Cost per rank and byte: add (n-1)/n + copy (n-1)/n.

    Rank r adds up the r-th part of all ranks' tensors in place, and writes the sum into the others' tensors. There
    are only two waits: until all have arrived, and until all are done.
    """
    board.begin("all_reduce in shared memory", everyone[0].nbytes, everyone[0].dtype)
    _meet(board)
    parts = [tensor.tensor_split(board.size)[board.rank] for tensor in everyone]
    pieces = [_chunks(part, SHARED_CHUNK_BYTES) for part in parts]
    for chunks in zip(*pieces, strict=True):
        mine = chunks[board.rank]
        for other in board.others:
            combine(mine, chunks[other], out=mine)
        for other in board.others:
            copy(chunks[other].data_ptr(), mine.data_ptr(), mine.nbytes)
    _meet(board)


def reduce_scatter_shared(board: Board, everyone: Sequence[Tensor], output: Tensor, combine: Combine) -> None:
    """As `reduce_scatter`, of tensors that all ranks can see: each reads the others' parts in place."""
    board.begin("reduce_scatter in shared memory", output.nbytes, output.dtype)
    _meet(board)
    parts = [tensor.chunk(board.size)[board.rank] for tensor in everyone]
    first, *rest = (parts[other] for other in board.others)
    pieces = zip(*(_chunks(t, SHARED_CHUNK_BYTES) for t in (output, parts[board.rank], first, *rest)), strict=True)
    for result, mine, theirs, *more in pieces:
        combine(mine, theirs, out=result)
        for piece in more:
            combine(result, piece, out=result)
    _meet(board)


def all_gather_shared(board: Board, everyone: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """As `all_gather`, of tensors that all ranks can see: each copies from the others, and that is the only copy."""
    board.begin("all_gather in shared memory", everyone[0].nbytes, everyone[0].dtype)
    _meet(board)
    for output, tensor in zip(outputs, everyone, strict=True):
        if output.data_ptr() != tensor.data_ptr():
            copy(output.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    _meet(board)


def reduce(board: Board, flat: Tensor, root: int, combine: Combine) -> None:
    """The root's tensor becomes the reduction over all ranks; the others' stay unchanged."""
    board.begin("reduce", flat.nbytes, flat.dtype)
    if board.size > 1:
        _all_reduce_direct(board, flat, combine, wanted=board.rank == root)


def reduce_scatter(board: Board, parts: Sequence[Tensor], output: Tensor, combine: Combine) -> None:
    """`output` becomes the reduction of every rank's `parts[rank]`; the parts stay unchanged."""
    board.begin("reduce_scatter", output.nbytes, output.dtype)
    if output.data_ptr() != parts[board.rank].data_ptr():
        copy(output.data_ptr(), parts[board.rank].data_ptr(), output.nbytes)
    pieces = [_chunks(output if rank == board.rank else part, _part_bytes(board)) for rank, part in enumerate(parts)]
    rounds = list(zip(*pieces, strict=True))
    _show_parts(board, [_place(part) for part in rounds[0]])
    for number, now in enumerate(rounds):
        if number + 1 < len(rounds):
            _show_parts(board, [_place(part) for part in rounds[number + 1]])
        _add_part(board, now[board.rank], combine)


def all_gather(board: Board, own: Tensor, outputs: Sequence[Tensor] | None) -> None:
    """`outputs[r]` becomes rank r's `own`. A rank that needs no result (in a gather, all but the root) gives None."""
    board.begin("all_gather", own.nbytes, own.dtype)
    if outputs is not None and outputs[board.rank].data_ptr() != own.data_ptr():
        copy(outputs[board.rank].data_ptr(), own.data_ptr(), own.nbytes)
    chunks, start = _chunks(own, CELL_BYTES), 0
    _show(board, chunks[0])
    for number, chunk in enumerate(chunks):
        if number + 1 < len(chunks):
            _show(board, chunks[number + 1])
        for other in board.others:
            cell = board.look(other)
            if outputs is not None:
                copy(outputs[other].data_ptr() + start, cell.address, chunk.nbytes)
            board.release(other)
        start += chunk.nbytes


def broadcast(board: Board, flat: Tensor, root: int) -> None:
    """All ranks get the root's tensor. First they compare titles: two ranks that both think they are the root would
    otherwise both send, and neither would read.
    """
    board.begin("broadcast", flat.nbytes, flat.dtype)
    _meet(board)
    for chunk in _chunks(flat, CELL_BYTES):
        if board.rank == root:
            _show(board, chunk)
        else:
            copy(chunk.data_ptr(), board.look(root).address, chunk.nbytes)
            board.release(root)


def scatter(board: Board, output: Tensor, parts: Sequence[Tensor] | None, root: int) -> None:
    """Rank r gets the root's `parts[r]`; only the root gives parts."""
    board.begin("scatter", output.nbytes, output.dtype)
    if parts is not None:
        copy(output.data_ptr(), parts[root].data_ptr(), output.nbytes)
        for pieces in zip(*(_chunks(part, _part_bytes(board)) for part in parts), strict=True):
            _show_parts(board, [_place(piece) for piece in pieces])
        return
    start = board.rank * _part_bytes(board)
    for chunk in _chunks(output, _part_bytes(board)):
        copy(chunk.data_ptr(), board.look(root).address + start, chunk.nbytes)
        board.release(root)


def all_to_all(board: Board, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """`outputs[r]` becomes rank r's `inputs[rank]`. Lengths may differ between pairs of ranks, and so may turns."""
    sent, received = ([part.numel() for part in parts] for parts in (inputs, outputs))
    everyone = _everyones(board, [*sent, *received])
    _check_lengths(everyone)
    copy(outputs[board.rank].data_ptr(), inputs[board.rank].data_ptr(), inputs[board.rank].nbytes)
    elements = max(1, _part_bytes(board) // inputs[0].itemsize)
    turns = [max(1, *(-(-length // elements) for length in lengths[: board.size])) for lengths in everyone]
    board.begin("all_to_all", 0, inputs[0].dtype)
    for turn in range(max(turns)):
        if turn < turns[board.rank]:
            _show_parts(board, [_place(part[turn * elements : (turn + 1) * elements]) for part in inputs])
        for other in board.others:
            if turn < turns[other]:
                cell, piece = board.look(other), outputs[other][turn * elements : (turn + 1) * elements]
                copy(piece.data_ptr(), cell.address + board.rank * _part_bytes(board), piece.nbytes)
                board.release(other)


def _check_lengths(everyone: list[list[int]]) -> None:
    """Every rank sees the lengths of all ranks, so all raise."""
    size = len(everyone)
    for sender, lengths in enumerate(everyone):
        for receiver in range(size):
            sent, expected = lengths[receiver], everyone[receiver][size + sender]
            if sent != expected:
                raise PeerError(
                    f"ranks disagree: in all_to_all rank {sender} sends {sent} elements to rank {receiver}, which "
                    f"expects {expected}"
                )


def _everyones(board: Board, numbers: list[int]) -> list[list[int]]:
    """All ranks' numbers, as many as ours."""
    found = torch.empty(board.size, len(numbers), dtype=torch.int64)
    all_gather(board, torch.tensor(numbers), list(found))
    return [[int(n) for n in row] for row in found.tolist()]


def barrier(board: Board) -> None:
    """Returns when all ranks have arrived."""
    board.begin("barrier")
    _meet(board)


def _meet(board: Board) -> None:
    board.take()
    board.show()
    for other in board.others:
        board.look(other)
        board.release(other)
