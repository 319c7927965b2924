"""Counted collectives: torch.distributed's, or ours by hand, each recorded in the ledger.

Names and meanings are torch.distributed's. Each comes twice: `all_reduce(...)` is done when it returns,
`all_reduce_async(...)` returns a `Pending` to wait for. Roots and peers are ranks of the group. Everything works in a
world of one rank without a process group, where there is nothing to do. `purpose` is what the ledger files it under.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.by_hand import all_reduce_by_hand
from lockstep.comm.ledger import active_ledger
from lockstep.comm.pending import Pending, note_end
from lockstep.comm.streams import on_its_stream
from lockstep.comm.wire import Wire, moves_cuda
from lockstep.errors import UserError
from lockstep.layout.group import Group, GroupLike, group_of

SUM = dist.ReduceOp.SUM
OTHER = "other"

# torch 2.13 renames them and warns at the old names; 2.11 and 2.12 have the old ones only.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def new_buffer(length: int, dtype: torch.dtype, device: torch.device, group: GroupLike = None) -> Tensor:
    """A buffer of zeros for repeated collectives: in memory that the backend does not have to copy, if it has any.

    All ranks of the group must call it together.
    """
    make_shared = getattr(group_of(group).process_group, "shared_empty", None)
    shared: Tensor | None = make_shared(length, dtype) if make_shared is not None and device.type == "cpu" else None
    return torch.zeros(length, dtype=dtype, device=device) if shared is None else shared.zero_()


def _issue(
    operation: str,
    payload: Tensor,
    purpose: str,
    group: Group,
    start: Callable[[], dist.Work | None],
    parts: int = 1,
    nbytes: float | None = None,
) -> Pending:
    """Issue it, and record it. `payload`: the whole array that it carries, or one of its equal `parts`. `nbytes`: of
    the whole, where its parts are not equal.
    """
    if group.size == 1:
        return Pending(None)
    ledger = active_ledger()
    if ledger is None:
        return Pending(start())
    entry = ledger.add(operation, purpose, group, payload.nbytes * parts if nbytes is None else nbytes)
    work = start()
    if work is not None:
        note_end(work, entry, payload.device, group)
    return Pending(work, entry, ledger.device)


def _starting(payload: Tensor, group: Group, collective: Callable[..., dist.Work | None]) -> Callable[[], Any]:
    """A function that issues one of torch.distributed's: on a GPU, on the group's stream."""
    if group.size > 1 and payload.is_cuda and moves_cuda(group.native):
        synchronous = partial(collective, group=group.native, async_op=False)
        return partial(on_its_stream, group.native, payload.device, synchronous)
    return partial(collective, group=group.process_group, async_op=True)


# ---- all ranks to all ranks ---------------------------------------------------------------------------------


def all_reduce_async(
    tensor: Tensor, op: Any = SUM, group: GroupLike = None, *, purpose: str = OTHER, algorithm: str = "native"
) -> Pending:
    """Begin to sum `tensor` over the ranks, in place: by the backend's own algorithm, or by one written by hand."""
    group = group_of(group)
    native = _starting(tensor, group, partial(dist.all_reduce, tensor, op=op))
    start = native if algorithm == "native" else partial(all_reduce_by_hand, tensor, algorithm, op, group.process_group)
    return _issue("all_reduce", tensor, purpose, group, start)


def all_reduce(
    tensor: Tensor, op: Any = SUM, group: GroupLike = None, *, purpose: str = OTHER, algorithm: str = "native"
) -> Tensor:
    """Sum `tensor` over the ranks, in place."""
    all_reduce_async(tensor, op, group, purpose=purpose, algorithm=algorithm).wait()
    return tensor


def all_reduce_mean_async(
    tensor: Tensor, group: GroupLike = None, *, purpose: str = OTHER, algorithm: str = "native"
) -> Pending:
    """Begin to average `tensor` over the ranks, in place. (gloo's AVG has returned sums: we sum, then divide.)"""
    group = group_of(group)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise UserError(f"a mean is for floating-point tensors, and this one is {tensor.dtype}; call .float() first")
    pending = all_reduce_async(tensor, SUM, group, purpose=purpose, algorithm=algorithm)
    return pending.then(lambda: tensor.div_(group.size))


def all_reduce_mean(
    tensor: Tensor, group: GroupLike = None, *, purpose: str = OTHER, algorithm: str = "native"
) -> Tensor:
    """Average `tensor` over the ranks, in place."""
    all_reduce_mean_async(tensor, group, purpose=purpose, algorithm=algorithm).wait()
    return tensor


def all_gather_async(tensor: Tensor, group: GroupLike = None, *, purpose: str = OTHER) -> tuple[Tensor, Pending]:
    """Begin to collect every rank's `tensor` (all of one shape): (ranks, *shape)."""
    group = group_of(group)
    size = group.size
    gathered = tensor.new_empty((size, *tensor.shape))
    if size == 1:
        gathered[0] = tensor

    start = _starting(tensor, group, partial(all_gather_single, gathered.view(-1), tensor.reshape(-1)))
    return gathered, _issue("all_gather", gathered, purpose, group, start)


def all_gather(tensor: Tensor, group: GroupLike = None, *, purpose: str = OTHER) -> Tensor:
    """Every rank's `tensor` (all of one shape): (ranks, *shape)."""
    gathered, pending = all_gather_async(tensor, group, purpose=purpose)
    pending.wait()
    return gathered


def all_gather_into_async(output: Tensor, part: Tensor, group: GroupLike = None, *, purpose: str = OTHER) -> Pending:
    """Begin to fill `output`, 1-D, with every rank's `part`, end to end. `part` may be its slice of `output`."""
    group = group_of(group)
    if group.size == 1 and output.data_ptr() != part.data_ptr():
        output.copy_(part)
    start = _starting(output, group, partial(all_gather_single, output, part))
    return _issue("all_gather", output, purpose, group, start)


def reduce_scatter_async(
    output: Tensor, tensor: Tensor, op: Any = SUM, group: GroupLike = None, *, purpose: str = OTHER
) -> Pending:
    """Begin to sum `tensor` over the ranks; each rank gets its n-th of the sum in `output`."""
    group = group_of(group)
    if group.size == 1 and output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor.view_as(output))
    start = _starting(tensor, group, partial(reduce_scatter_single, output.view(-1), tensor.view(-1), op=op))
    return _issue("reduce_scatter", tensor, purpose, group, start)


def reduce_scatter(
    output: Tensor, tensor: Tensor, op: Any = SUM, group: GroupLike = None, *, purpose: str = OTHER
) -> Tensor:
    """Sum `tensor` over the ranks; each keeps its own n-th in `output`."""
    reduce_scatter_async(output, tensor, op, group, purpose=purpose).wait()
    return output


def all_to_all_async(
    output: Tensor,
    tensor: Tensor,
    group: GroupLike = None,
    received: list[int] | None = None,
    sent: list[int] | None = None,
    *,
    purpose: str = OTHER,
) -> Pending:
    """Begin to send the r-th part of `tensor`'s rows to rank r; `output` is what the ranks send us, in their order.

    `sent`, `received`: rows of each part; None: equal parts.
    """
    group = group_of(group)
    if group.size == 1:
        output.copy_(tensor)
    start = _starting(tensor, group, partial(dist.all_to_all_single, output, tensor, received, sent))
    nbytes = None
    if sent is not None and group.size > 1:  # of an array of which all but an n-th leaves this rank
        leaving = tensor.nbytes * (sum(sent) - sent[group.rank]) // max(1, sum(sent))
        nbytes = leaving * group.size / (group.size - 1)
    return _issue("all_to_all", tensor, purpose, group, start, nbytes=nbytes)


def all_to_all(output: Tensor, tensor: Tensor, group: GroupLike = None, *, purpose: str = OTHER) -> Tensor:
    """Send the r-th part of `tensor`'s rows to rank r; `output` is what the ranks send us, in their order."""
    all_to_all_async(output, tensor, group, purpose=purpose).wait()
    return output


def barrier_async(group: GroupLike = None, *, purpose: str = OTHER) -> Pending:
    """Signal that this rank has reached the barrier; wait for the others later."""
    group = group_of(group)
    on_gpu = "nccl" in group.backend
    device_ids = [torch.cuda.current_device()] if on_gpu else None
    nothing = torch.empty(0, device="cuda" if on_gpu else "cpu")
    start = partial(dist.barrier, group=group.process_group, async_op=True, device_ids=device_ids)
    return _issue("barrier", nothing, purpose, group, start)


def barrier(group: GroupLike = None, *, purpose: str = OTHER) -> None:
    """Return when every rank has reached the barrier."""
    barrier_async(group, purpose=purpose).wait()


# ---- from one rank, or to one -------------------------------------------------------------------------------


def broadcast_async(tensor: Tensor, src: int = 0, group: GroupLike = None, *, purpose: str = OTHER) -> Pending:
    """Begin to copy rank `src`'s `tensor` to all, in place."""
    group = group_of(group)
    start = _starting(tensor, group, partial(dist.broadcast, tensor, group_src=src))
    return _issue("broadcast", tensor, purpose, group, start)


def broadcast(tensor: Tensor, src: int = 0, group: GroupLike = None, *, purpose: str = OTHER) -> Tensor:
    """Copy rank `src`'s `tensor` to all, in place."""
    broadcast_async(tensor, src, group, purpose=purpose).wait()
    return tensor


def reduce_async(
    tensor: Tensor, dst: int = 0, op: Any = SUM, group: GroupLike = None, *, purpose: str = OTHER
) -> Pending:
    """Begin to sum `tensor` over the ranks, in place on rank `dst`; what the others hold afterwards is undefined."""
    group = group_of(group)
    start = _starting(tensor, group, partial(dist.reduce, tensor, group_dst=dst, op=op))
    return _issue("reduce", tensor, purpose, group, start)


def reduce(tensor: Tensor, dst: int = 0, op: Any = SUM, group: GroupLike = None, *, purpose: str = OTHER) -> Tensor:
    """Sum `tensor` over the ranks, in place on rank `dst`; what the others hold afterwards is undefined."""
    reduce_async(tensor, dst, op, group, purpose=purpose).wait()
    return tensor


def scatter_async(
    tensor: Tensor,
    parts: Sequence[Tensor] | None = None,
    src: int = 0,
    group: GroupLike = None,
    *,
    purpose: str = OTHER,
) -> Pending:
    """Begin to give rank r the r-th of rank `src`'s `parts`, in `tensor`; only `src` gives parts."""
    group = group_of(group)
    if group.size == 1 and parts is not None:
        tensor.copy_(parts[0])
    start = _starting(tensor, group, partial(dist.scatter, tensor, list(parts) if parts else None, group_src=src))
    return _issue("scatter", tensor, purpose, group, start, group.size)


def scatter(
    tensor: Tensor,
    parts: Sequence[Tensor] | None = None,
    src: int = 0,
    group: GroupLike = None,
    *,
    purpose: str = OTHER,
) -> Tensor:
    """Give rank r the r-th of rank `src`'s `parts`, in `tensor`; only `src` gives parts."""
    scatter_async(tensor, parts, src, group, purpose=purpose).wait()
    return tensor


def gather_async(
    tensor: Tensor,
    parts: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: GroupLike = None,
    *,
    purpose: str = OTHER,
) -> Pending:
    """Begin to collect every rank's `tensor` in rank `dst`'s `parts`; only `dst` gives parts."""
    group = group_of(group)
    if group.size == 1 and parts is not None:
        parts[0].copy_(tensor)
    start = _starting(tensor, group, partial(dist.gather, tensor, list(parts) if parts else None, group_dst=dst))
    return _issue("gather", tensor, purpose, group, start, group.size)


def gather(
    tensor: Tensor,
    parts: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: GroupLike = None,
    *,
    purpose: str = OTHER,
) -> None:
    """Collect every rank's `tensor` in rank `dst`'s `parts`; only `dst` gives parts."""
    gather_async(tensor, parts, dst, group, purpose=purpose).wait()


# ---- from one rank to another -------------------------------------------------------------------------------


def send_async(tensor: Tensor, dst: int, group: GroupLike = None, *, tag: int = 0, purpose: str = OTHER) -> Pending:
    """Begin to send `tensor` to rank `dst`."""
    group = group_of(group)
    return _issue(
        "send", tensor, purpose, group, lambda: dist.isend(tensor, group_dst=dst, group=group.native, tag=tag)
    )


def send(tensor: Tensor, dst: int, group: GroupLike = None, *, tag: int = 0, purpose: str = OTHER) -> None:
    """Send `tensor` to rank `dst`."""
    send_async(tensor, dst, group, tag=tag, purpose=purpose).wait()


def recv_async(tensor: Tensor, src: int, group: GroupLike = None, *, tag: int = 0, purpose: str = OTHER) -> Pending:
    """Begin to fill `tensor` with what rank `src` sends."""
    group = group_of(group)
    return _issue(
        "recv", tensor, purpose, group, lambda: dist.irecv(tensor, group_src=src, group=group.native, tag=tag)
    )


def recv(tensor: Tensor, src: int, group: GroupLike = None, *, tag: int = 0, purpose: str = OTHER) -> Tensor:
    """Fill `tensor` with what rank `src` sends."""
    recv_async(tensor, src, group, tag=tag, purpose=purpose).wait()
    return tensor


def exchange_async(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    group: GroupLike = None,
    *,
    purpose: str = OTHER,
) -> Pending:
    """Issue sends to some ranks and receives from some, all at once: (tensor, rank) each. In sequence, two
    ranks that both send first would deadlock.
    """
    group = group_of(group)
    if group.size == 1:
        for (sent, _), (received, _) in zip(sends, receives, strict=True):
            received.copy_(sent)
    payload = torch.empty(sum(t.nbytes for t, _ in sends), dtype=torch.uint8, device="meta")
    return _issue("send", payload, purpose, group, lambda: Wire(group.native).exchange(sends, receives))


# ---- objects ------------------------------------------------------------------------------------------------


def all_gather_objects(value: Any, group: GroupLike = None) -> list[Any]:
    """Every rank's `value`, pickled. For the odd report, not for the step."""
    group = group_of(group)
    values = [value] * group.size
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group.native)
    return values
