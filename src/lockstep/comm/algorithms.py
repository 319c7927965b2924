"""Collectives by hand, over send and receive only. Each is a function that reads like its description.

In the costs, n is the number of ranks, S the tensor's bytes, and time is counted on the busiest rank:

    a   latency of one message
    b   seconds per byte sent
    c   seconds per byte added

Tensors are flat and contiguous, and combined in place; `combine` is torch.add, torch.maximum, ...
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.comm.reduction import Combine
from lockstep.comm.wire import Wire

PIECE_BYTES = 1024 * 1024
"""Long messages go in pieces, so that one piece is added while the next is in flight."""


# ---- all-reduce -------------------------------------------------------------------------------------------------


def naive(wire: Wire, flat: Tensor, combine: Combine) -> None:
    """Every rank sends all to rank 0, which adds it up and sends it back. The root does all the work.

    2(n-1)a + 2(n-1)S b + (n-1)S c
    """
    if wire.rank == 0:
        theirs = torch.empty_like(flat)
        for other in range(1, wire.size):
            wire.receive(theirs, other)
            combine(flat, theirs, out=flat)
        for other in range(1, wire.size):
            wire.send(flat, other)
    else:
        wire.send(flat, 0)
        wire.receive(flat, 0)


def tree(wire: Wire, flat: Tensor, combine: Combine) -> None:
    """A binomial tree: in step k, ranks 2^k apart pair up, and one sends its sum and drops out; then back in reverse.

    2 log2(n)a + 2 log2(n)S b + log2(n)S c
    """
    tree_reduce(wire, flat, combine)
    tree_broadcast(wire, flat)


def ring(wire: Wire, flat: Tensor, combine: Combine) -> None:
    """Each rank talks to its two neighbours only: a reduce-scatter, then an all-gather, around the ring.

    The tensor is cut into n chunks. In each of n-1 steps every rank passes one chunk on and adds the one that comes
    in; then each owns one chunk's total. In n-1 more steps the totals go around.

    2(n-1)a + 2(n-1)/n S b + (n-1)/n S c: every rank sends almost the least possible, all the time.
    """
    chunks = flat.tensor_split(wire.size)
    ring_reduce_scatter(wire, chunks, combine)
    ring_all_gather(wire, chunks)


def recursive_doubling(wire: Wire, flat: Tensor, combine: Combine) -> None:
    """In step k, ranks 2^k apart exchange everything and both add: log2(n) steps, the least latency.

    log2(n)a + log2(n)S b + log2(n)S c; and for n not a power of two, 2a + 2S b + S c more (see `_fold`).
    """
    core = _fold(wire, flat, combine)
    if core is not None:
        theirs, distance = torch.empty_like(flat), 1
        while distance < core.size:
            partner = core.rank ^ distance
            core.exchange([(flat, partner)], [(theirs, partner)]).wait()
            combine(flat, theirs, out=flat)
            distance *= 2
    _unfold(wire, flat)


def halving_doubling(wire: Wire, flat: Tensor, combine: Combine) -> None:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling (Rabenseifner).

    In step k partners split what they hold: each sends the half that the other keeps, and adds the half that it
    keeps itself. After log2(n) steps each rank holds one n-th, summed up; then the same way back.

    2 log2(n)a + 2(n-1)/n S b + (n-1)/n S c; and for n not a power of two, 2a + 2S b + S c more (see `_fold`).
    """
    core = _fold(wire, flat, combine)
    if core is not None and core.size > 1:
        held, given = flat, []
        theirs = torch.empty_like(flat)
        distance = core.size // 2
        while distance:
            low, high = held.tensor_split(2)
            partner = core.rank ^ distance
            held, sent = (high, low) if core.rank & distance else (low, high)
            arriving = theirs[: held.numel()]
            core.exchange([(sent, partner)], [(arriving, partner)]).wait()
            combine(held, arriving, out=held)
            given.append((held, sent, partner))
            distance //= 2
        for held, sent, partner in reversed(given):
            core.exchange([(held, partner)], [(sent, partner)]).wait()
    _unfold(wire, flat)


def double_tree(wire: Wire, flat: Tensor, combine: Combine) -> None:
    """Two binary trees, each for one half of the tensor, with pieces pipelined up and down.

    A leaf of one tree is an inner node of the other (for all but at most one rank), so every rank sends about as
    much as it receives, at a latency that grows with log2(n) only.

    2(log2(n) + pieces)a + 2S b + S c
    """
    trees = [binary_tree(wire.rank, wire.size), shifted_binary_tree(wire.rank, wire.size)]
    halves = flat.tensor_split(2)
    rounds = [
        (piece, parent, children)
        for pieces in _side_by_side([_pieces(half) for half in halves])
        for piece, (parent, children) in zip(pieces, trees, strict=True)
    ]
    sending = []
    for piece, parent, children in rounds:  # up: add what the children send, pass it on
        theirs = [torch.empty_like(piece) for _ in children]
        wire.exchange(receive=list(zip(theirs, children, strict=True))).wait()
        for contribution in theirs:
            combine(piece, contribution, out=piece)
        if parent is not None:
            sending.append(wire.exchange(send=[(piece, parent)]))
    for messages in sending:
        messages.wait()
    sending = []
    for piece, parent, children in rounds:  # down: the sums
        if parent is not None:
            wire.receive(piece, parent)
        sending.append(wire.exchange(send=[(piece, child) for child in children]))
    for messages in sending:
        messages.wait()


def hierarchical(wire: Wire, flat: Tensor, combine: Combine) -> None:
    """Add up inside each node, all-reduce between the nodes by a ring of their first ranks, broadcast inside each node.

    The slow links between nodes carry 2(m-1)/m S per node for m nodes of l ranks, however many ranks a node has.

    2 log2(l)a + 2(m-1)a + (2 log2(l) + 2(m-1)/m)S b + (log2(l) + (m-1)/m)S c
    """
    local = wire.ranks_per_node
    first = wire.rank // local * local
    node = wire.among(list(range(first, min(first + local, wire.size))))
    tree_reduce(node, flat, combine)
    if wire.rank == first:
        ring(wire.among(list(range(0, wire.size, local))), flat, combine)
    tree_broadcast(node, flat)


# ---- their parts ------------------------------------------------------------------------------------------------


def ring_reduce_scatter(wire: Wire, chunks: Sequence[Tensor], combine: Combine) -> Tensor:
    """Returns `chunks[rank]`, which then holds the sum over all ranks; the other chunks are left as partial sums.

    (n-1)a + (n-1)/n S b + (n-1)/n S c. While one piece of a chunk is added, the next is in flight.
    """
    rank, size = wire.rank, wire.size
    right, left = (rank + 1) % size, (rank - 1) % size
    buffer = torch.empty_like(max(chunks, key=len))
    for step in range(size - 1):
        sent, kept = chunks[(rank - step - 1) % size], chunks[(rank - step - 2) % size]
        arriving = buffer[: kept.numel()]
        under_way = [
            (wire.exchange(send, receive), target, received)
            for send, receive, target, received in _piecewise(sent, right, kept, arriving, left)
        ]
        for messages, target, received in under_way:
            messages.wait()
            combine(target, received, out=target)
    return chunks[rank]


def ring_all_gather(wire: Wire, chunks: Sequence[Tensor]) -> None:
    """Every rank has its own `chunks[rank]`; afterwards every rank has all.

    (n-1)a + (n-1)/n S b
    """
    rank, size = wire.rank, wire.size
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        sent, arriving = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        # In pieces here too: between two ranks, gloo sends one message and then the other, not both at once.
        under_way = [wire.exchange(s, r) for s, r, _, _ in _piecewise(sent, right, arriving, arriving, left)]
        for messages in under_way:
            messages.wait()


def tree_reduce(wire: Wire, flat: Tensor, combine: Combine) -> None:
    """Rank 0's tensor becomes the sum over all ranks; the others' become partial sums.  log2(n)(a + S b + S c)"""
    theirs, distance = torch.empty_like(flat), 1
    while distance < wire.size:
        if wire.rank & distance:
            wire.send(flat, wire.rank - distance)
            return
        if wire.rank + distance < wire.size:
            wire.receive(theirs, wire.rank + distance)
            combine(flat, theirs, out=flat)
        distance *= 2


def tree_broadcast(wire: Wire, flat: Tensor) -> None:
    """All ranks get rank 0's: the ranks that have it double with each step.  log2(n)(a + S b)"""
    distance = 1
    while distance < wire.size:
        distance *= 2
    while distance > 1:
        distance //= 2
        if wire.rank % (2 * distance) == distance:
            wire.receive(flat, wire.rank - distance)
        elif wire.rank % (2 * distance) == 0 and wire.rank + distance < wire.size:
            wire.send(flat, wire.rank + distance)


def _fold(wire: Wire, flat: Tensor, combine: Combine) -> Wire | None:
    """If n is not a power of two, each rank past the largest power below n sends its data to a partner and drops out.

    Returns the wire between the ranks that remain; None on ranks that dropped out.
    """
    core = 1 << (wire.size.bit_length() - 1)
    if wire.rank >= core:
        wire.send(flat, wire.rank - core)
        return None
    if wire.rank + core < wire.size:
        theirs = torch.empty_like(flat)
        wire.receive(theirs, wire.rank + core)
        combine(flat, theirs, out=flat)
    return wire.among(list(range(core)))


def _unfold(wire: Wire, flat: Tensor) -> None:
    """Send the result to the ranks that dropped out."""
    core = 1 << (wire.size.bit_length() - 1)
    if wire.rank >= core:
        wire.receive(flat, wire.rank - core)
    elif wire.rank + core < wire.size:
        wire.send(flat, wire.rank + core)


def binary_tree(rank: int, size: int) -> tuple[int | None, list[int]]:
    """(parent, children) in the tree whose in-order traversal is 0, 1, ..., n-1. Its leaves are the even ranks."""
    low, high, parent = 0, size, None
    while True:
        root = low + (1 << ((high - low).bit_length() - 1)) - 1
        if rank == root:
            break
        parent = root
        low, high = (low, root) if rank < root else (root + 1, high)
    spans = [(low, root), (root + 1, high)]
    children = [start + (1 << ((end - start).bit_length() - 1)) - 1 for start, end in spans if end > start]
    return parent, children


def shifted_binary_tree(rank: int, size: int) -> tuple[int | None, list[int]]:
    """The same tree with all ranks shifted by one: its leaves are the odd ranks."""
    parent, children = binary_tree((rank + 1) % size, size)
    return None if parent is None else (parent - 1) % size, [(child - 1) % size for child in children]


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    return flat.split(max(1, PIECE_BYTES // flat.itemsize))


def _side_by_side(rows: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Transposed; shorter rows are filled up with empty tensors."""
    longest = max(len(row) for row in rows)
    return list(zip(*([*row, *[row[0][:0]] * (longest - len(row))] for row in rows), strict=True))


def _piecewise(
    sent: Tensor, to: int, kept: Tensor, arriving: Tensor, source: int
) -> list[tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]], Tensor, Tensor]]:
    """The exchange of two chunks, cut into exchanges of pieces: (send, receive, target, received) of each."""
    pieces = _side_by_side([_pieces(sent), _pieces(kept), _pieces(arriving)])
    return [([(s, to)], [(received, source)], target, received) for s, target, received in pieces]


# ---- the table --------------------------------------------------------------------------------------------------


ALGORITHMS: dict[str, Callable[[Wire, Tensor, Combine], None]] = {
    "naive": naive,
    "tree": tree,
    "ring": ring,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "double_tree": double_tree,
    "hierarchical": hierarchical,
}
"""All-reduce by hand."""
