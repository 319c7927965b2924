"""FSDP2's collectives in the ledger, and where its computation waits for them.

On the CPU FSDP2 waits at once. On a GPU it issues collectives on streams of its own, and the compute stream waits for
them in three places, which are methods of FSDP2's parameter groups (private ones: this is the only file that names
them):

    wait_for_unshard    before a block computes: for its all-gather (then the gathered buffer is copied out)
    post_backward       after a block's backward: for the reduce-scatter of the block before, whose buffer is reused
    finalize_backward   at the end of backward: for the last reduce-scatter
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.collectives import all_gather_single, reduce_scatter_single
from lockstep.comm.ledger import Entry, about, active_ledger, mark
from lockstep.comm.observe import observed
from lockstep.layout.group import group_of


def observe(module: Any, name: str, device: torch.device) -> None:
    """Record the collectives of this `fully_shard`ed module in the ledger, under the block's name."""
    module.set_custom_all_gather(ObservedGather(name))
    module.set_custom_reduce_scatter(ObservedScatter(name))
    if device.type == "cuda":
        for group in parameter_groups(module):
            for method, waited_for in WAITS.items():
                setattr(group, method, timed(getattr(group, method), waited_for, name, device))


class ObservedGather:
    """FSDP2's all-gather."""

    def __init__(self, name: str) -> None:
        """`name`: of the block."""
        self.name = name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with about(self.name), observed("all_gather", "parameters", output_tensor, group_of(group, "shard")):
            work: dist.Work | None = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class ObservedScatter(ObservedGather):
    """Its reduce-scatter."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with about(self.name), observed("reduce_scatter", "gradients", input_tensor, group_of(group, "shard")):
            work: dist.Work | None = reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        return work


def parameter_groups(module: Any) -> list[Any]:
    """torch 2.13 allows several for one module; 2.11 has one, or none."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    return list(several) if several is not None else [g for g in [state._fsdp_param_group] if g is not None]


def is_complete(module: Any, complete: Collection[Tensor]) -> bool:
    """Whether all trained parameters of a `fully_shard`ed module are among these, sharded or unsharded."""
    for group in parameter_groups(module):
        for parameter in group.fsdp_params:
            both = (parameter.sharded_param, getattr(parameter, "_unsharded_param", None))
            if parameter.sharded_param.requires_grad and not any(one in complete for one in both):
                return False
    return True


def widen(module: Any) -> None:
    """Add gradients to those of earlier passes in the dtype in which they are reduced, as FSDP2 does when a module's
    backward ends: a weight pass comes after that.
    """
    for group in parameter_groups(module):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def reduce_now(module: Any) -> None:
    """What FSDP2 does when a module's backward ends."""
    for group in parameter_groups(module):
        group.post_backward()


def overlap_reductions(model: Any, modules: Collection[Any]) -> list[Any]:
    """Let the reduce-scatters of all modules be in flight at once. FSDP2 lets only one be: backward waits for it before
    it copies the next block's gradients, and in a pipeline so does the message to the stage before.

    Returns what must be cleared when all reductions are complete: it holds what is being reduced.
    """
    held: list[Any] = []
    if hasattr(model, "set_reduce_scatter_max_input_buffers"):  # torch 2.13
        model.set_reduce_scatter_max_input_buffers(max(1, len(modules)))
        return held
    for group in (group for module in modules for group in parameter_groups(module)):
        group.post_backward = unhurried(group.post_backward, group, held)
    return held


def unhurried(post_backward: Callable[[], Any], group: Any, held: list[Any]) -> Callable[[], Any]:
    """`post_backward` of a group, which finds no earlier reduction to wait for."""

    def called(*unused: Any) -> Any:
        held.append(group.comm_ctx.reduce_scatter_state)
        group.comm_ctx.reduce_scatter_state = None
        return post_backward(*unused)

    return called


def end_backward(root: Any, is_last: bool = False) -> None:
    """What FSDP2 does when a backward has ended. When the last one has, the compute stream waits for all reductions:
    in a pipeline not before the gradients have been sent to the stage before.
    """
    root.set_is_last_backward(is_last)
    root._get_fsdp_state()._root_post_backward_final_callback()


def gather_of(entry: Entry, name: str) -> bool:
    return entry.operation == "all_gather" and entry.subject == name


def scatter_of_another(entry: Entry, name: str) -> bool:
    return entry.operation == "reduce_scatter" and entry.subject != name


def scatter_of_any(entry: Entry, name: str) -> bool:
    return entry.operation == "reduce_scatter"


WAITS: dict[str, Callable[[Entry, str], bool]] = {
    "wait_for_unshard": gather_of,
    "post_backward": scatter_of_another,
    "finalize_backward": scatter_of_any,
}
"""Method -> which collective it waits for."""


def timed(call: Callable[..., Any], waited_for: Callable[[Entry, str], bool], name: str, device: torch.device) -> Any:
    """`call`, recording how long the compute stream waits in it, in the entry of the collective that it waits for."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        ledger = active_ledger()
        open_ = [e for e in ledger.entries if e.wait_started is None and waited_for(e, name)] if ledger else []
        start = mark(device) if open_ else None
        result = call(*args, **kwargs)
        if open_:
            open_[-1].wait_started, open_[-1].wait_ended = start, mark(device)
        return result

    return noted
