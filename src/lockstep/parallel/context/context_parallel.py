"""Context parallelism by hand: each rank holds part of a sequence, and attention covers all of it.

Placement. With causal attention late positions attend to more keys than early ones: equal runs would be unequal work.
A sequence is cut into 2n chunks, and rank r has chunk r and chunk 2n - 1 - r ("zig-zag"): one early, one late.

    n = 2     chunk     0   1   2   3
              rank      0   1   1   0

Ring attention. Keys and values go round the ring, n - 1 times to the next rank; each rank's queries attend to the
current block, while the next block is in flight. The blocks' outputs are merged by their log-sum-exps (online
softmax), so no rank ever has scores of the whole sequence. In zig-zag, all queries attend to the first half of a block
from an earlier rank, and the second half of the queries to all of a block from a later rank: the same work for every
rank at every step. Only outputs and log-sum-exps are saved; backward sends keys and values round again, and their
gradients follow one step behind, each rank adding its share, until they are back on the block's own rank.

Ulysses. An all-to-all gives every rank all positions of some heads; then ordinary attention, and an all-to-all back.
It sends fewer bytes, but none of them overlap with compute, and there can be at most as many ranks as heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.comm.collectives import all_to_all, exchange_async
from lockstep.comm.pending import Pending
from lockstep.errors import UserError
from lockstep.layout.group import Group, GroupLike, group_of
from lockstep.models.autocast import as_autocast
from lockstep.parallel.context.attention_block import Both, attention_block, attention_block_backward, joined
from lockstep.parallel.tensor.exchange import PURPOSE, gather_from_ranks
from lockstep.uncompiled import uncompiled

# ---- who has which positions ---------------------------------------------------------------------------------------


def positions_of(rank: int, ranks: int, length: int) -> Tensor:
    """Which of `length` positions a rank holds: two chunks, one from each end."""
    if length % (2 * ranks):
        raise UserError(
            f"a sequence of {length} positions cannot be cut into {2 * ranks} equal chunks, two for each of {ranks} "
            f"ranks; give a multiple of {2 * ranks}"
        )
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank])) if ranks > 1 else torch.arange(length)


def shard_sequence(tensor: Tensor, dim: int, process_group: GroupLike = None) -> Tensor:
    """This rank's positions of a tensor that every rank holds in full; `dim` is the sequence dimension.

        mine = lockstep.shard_sequence(tokens, dim=1)

    Zig-zag: the first rank has the first and the last chunk, so that causal attention costs all ranks the same.
    """
    group = group_of(process_group, "cp")
    if group.size == 1:
        return tensor
    return tensor.index_select(dim, positions_of(group.rank, group.size, tensor.shape[dim]).to(tensor.device))


def gather_sequence(tensor: Tensor, dim: int, process_group: GroupLike = None) -> Tensor:
    """The opposite of `shard_sequence`: all positions, in their order, from the ranks' parts.

        mine = lockstep.shard_sequence(tokens, dim=1)
        assert torch.equal(lockstep.gather_sequence(mine, dim=1), tokens)

    Every rank gets the whole.
    """
    group = group_of(process_group, "cp")
    if group.size == 1:
        return tensor
    whole = gather_from_ranks(tensor, group, dim)
    return whole.index_select(dim, natural_order(group, whole.shape[dim]).to(tensor.device))


def natural_order(group: Group, length: int) -> Tensor:
    """The index of each position in the concatenation of the ranks' parts."""
    laid = torch.cat([positions_of(rank, group.size, length) for rank in range(group.size)])
    return laid.argsort()


# ---- ring attention ------------------------------------------------------------------------------------------------


@uncompiled
def ring_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, process_group: GroupLike = None) -> Tensor:
    """Attention of this rank's queries to all ranks' keys, which go round a ring.

        q, k, v = (lockstep.shard_sequence(x, dim=2) for x in (q, k, v))
        mine = lockstep.ring_attention(q, k, v, causal=True)

    q: (batch, heads, this rank's positions, dim); k and v may have fewer heads. Positions are as `shard_sequence` cuts.
    """
    check_shapes(q, k, v)
    group = group_of(process_group, "cp")
    if causal and group.size > 1 and q.shape[2] % 2:
        raise UserError(f"this rank has {q.shape[2]} positions, but zig-zag has two equal chunks; use shard_sequence")
    out: Tensor = _Ring.apply(*as_autocast(q, k, v), causal, group)
    return out


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[1] % k.shape[1]:
        raise UserError(f"{q.shape[1]} heads of queries cannot share {k.shape[1]} heads of keys equally")
    if k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[3] != k.shape[3]:
        raise UserError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} must be of the same "
            f"positions and sizes: this is attention of a sequence to itself"
        )


class Rotation:
    """Sends a tensor to the next rank of the ring, and receives one from the rank before."""

    def __init__(self, tensor: Tensor, group: Group) -> None:
        self.received = torch.empty_like(tensor)
        self._sent = tensor
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self._pending: Pending = exchange_async([(tensor, after)], [(self.received, before)], group, purpose=PURPOSE)

    def wait(self) -> Tensor:
        self._pending.wait()
        return self.received


class Seen:
    """Which part of a block is attended to, and by which queries."""

    def __init__(self, mine: int, owner: int, causal: bool, length: int) -> None:
        """`length`: of this rank's positions."""
        everything, half = slice(0, length), length // 2
        self.queries, self.keys, self.causal = everything, everything, causal and mine == owner
        if causal and owner < mine:
            self.keys = slice(0, half)
        elif causal and owner > mine:
            self.queries = slice(half, length)


class _Ring(torch.autograd.Function):
    """Ring attention: keys and values are sent round the ring, and in backward their gradients too."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, group: Group) -> Tensor:
        q, block = q.contiguous(), torch.stack((k, v))
        mine = block
        for step in range(group.size):
            flight = Rotation(block, group) if step < group.size - 1 else None
            seen = Seen(group.rank, (group.rank - step) % group.size, causal, q.shape[2])
            k_block, v_block = block[:, :, :, seen.keys]
            found = attention_block(q[:, :, seen.queries], *expanded(q, k_block, v_block), seen.causal)
            if step == 0:
                out, lse = found[0].to(wide(q.dtype)), found[1].contiguous()
            else:
                rows: Both = (out[:, :, seen.queries], lse[:, :, seen.queries])
                out[:, :, seen.queries], lse[:, :, seen.queries] = joined(rows, found)
            if flight is not None:
                block = flight.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, mine, out, lse)
        ctx.causal, ctx.group = causal, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, block, out, lse = ctx.saved_tensors
        group, causal = ctx.group, ctx.causal
        gradient = gradient.contiguous()
        for_q = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
        following: Rotation | None = None  # gradients of the current block, from the ranks before
        for step in range(group.size):
            flight = Rotation(block, group) if step < group.size - 1 else None
            seen = Seen(group.rank, (group.rank - step) % group.size, causal, q.shape[2])
            k_block, v_block = block[:, :, :, seen.keys]
            k_block, v_block = expanded(q, k_block, v_block)
            g, q_rows, o, s = (t[:, :, seen.queries].contiguous() for t in (gradient, q, out, lse))
            found = attention_block_backward(g, q_rows, k_block.contiguous(), v_block.contiguous(), o, s, seen.causal)
            for_q[:, :, seen.queries] += found[0]
            if following is None:
                here = torch.zeros(block.shape, dtype=wide(q.dtype), device=q.device)
            else:
                here = following.wait()
            for index, part in enumerate(found[1:]):
                here[index][:, :, seen.keys] += shrunk(part, block.shape[2])
            if step == 0:  # this rank's own block: its gradients stay here
                own = here
            else:
                following = Rotation(here, group)
            if flight is not None:
                block = flight.wait()
        home = own if following is None else following.wait().add_(own)
        return for_q.to(q.dtype), home[0].to(q.dtype), home[1].to(q.dtype), None, None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which blocks are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for every query head, where several share one."""
    sharing = q.shape[1] // k.shape[1]
    return (k, v) if sharing == 1 else (k.repeat_interleave(sharing, 1), v.repeat_interleave(sharing, 1))


def shrunk(gradient: Tensor, heads: int) -> Tensor:
    """A gradient summed over the query heads that share a key head."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


# ---- Ulysses -------------------------------------------------------------------------------------------------------


@uncompiled
def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, process_group: GroupLike = None) -> Tensor:
    """As `ring_attention`, by an all-to-all over heads and one back.

        q, k, v = (lockstep.shard_sequence(x, dim=2) for x in (q, k, v))
        mine = lockstep.ulysses_attention(q, k, v, causal=True)

    The ranks must divide the heads.
    """
    check_shapes(q, k, v)
    group = group_of(process_group, "cp")
    n, heads = group.size, q.shape[1]
    if heads % n:
        raise UserError(f"ulysses_attention gives each of {n} ranks some heads, and {heads} do not divide; use ring")
    if k.shape[1] % n:
        if n % k.shape[1]:
            raise UserError(f"{k.shape[1]} heads of keys cannot be given to {n} ranks equally; use ring_attention")
        k, v = (t.repeat_interleave(n // k.shape[1], 1) for t in (k, v))
    order = natural_order(group, n * q.shape[2]).to(q.device) if n > 1 else None
    q, k, v = (_ChangePlaces.apply(t, group, 1, 2) if n > 1 else t for t in (q, k, v))
    if order is not None:
        q, k, v = (t.index_select(2, order) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    if order is None:
        return out
    back: Tensor = _ChangePlaces.apply(out.index_select(2, order.argsort()), group, 2, 1)
    return back


class _ChangePlaces(torch.autograd.Function):
    """An all-to-all that splits dimension `given` over the ranks and gathers `taken`: heads and positions, or
    back. Backward is the opposite.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, given: int, taken: int) -> Tensor:
        ctx.group, ctx.given, ctx.taken = group, given, taken
        return changed_places(x, group, given, taken)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return changed_places(gradient, ctx.group, ctx.taken, ctx.given), None, None, None


def changed_places(x: Tensor, group: Group, given: int, taken: int) -> Tensor:
    sent = torch.stack(x.chunk(group.size, given))
    received = all_to_all(torch.empty_like(sent), sent, group, purpose=PURPOSE)
    return torch.cat(list(received), taken)
