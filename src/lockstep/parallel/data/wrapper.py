"""The base of the wrappers that average gradients over the ranks, and how all ranks start with the same model.

The end of a backward pass. Autograd has no hook for it, but it runs callbacks that were queued during the pass. A round
is opened by the first gradient of a backward pass, that of an output or of a parameter, whichever comes first; that
queues the callback, and the callback closes the round: it issues the remaining reductions and waits for all, and then
the gradients are the mean. So after `loss.backward()` there is nothing left to call, as with PyTorch's DDP and FSDP2.

On a rank where neither an output nor a parameter took part in the loss, no hook fires; it has to call
`finish_gradient_synchronization()`, because the others wait for it. With DDP they would hang.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lockstep.comm.collectives import all_gather_objects, all_reduce_async, broadcast
from lockstep.comm.hosts import flag_device
from lockstep.errors import UserError
from lockstep.layout.group import Group, GroupLike, group_of, replicas_of
from lockstep.layout.region import local
from lockstep.models.experts import mixtures_in
from lockstep.models.recompute import backward_is_running, when_backward_is_over
from lockstep.parallel.experts.tally import tally_over
from lockstep.parallel.holding import Holder


class GradientWrapper(nn.Module, Holder, ABC):
    """Call it like the module; after `backward()` the gradients are the mean over the ranks.

    `manual`: only after `finish_gradient_synchronization()`, and the next forward fails without that call.
    """

    def __init__(self, module: nn.Module, group: Group, manual: bool = False) -> None:
        super().__init__()
        check_experts_are_averaged(module, group, type(self).__name__)
        tally_over(module, group)
        self.module, self.group, self.manual = module, group, manual
        self._synchronizing = True
        self._round_is_open = False
        """A backward pass has begun, and its gradients are not the mean yet."""
        self._forward_ran = False
        """A forward pass has run since the last round was closed."""
        self._buffers_may_differ = True
        """The last training forward was not under `no_sync`, so running statistics may differ between ranks."""
        self._last_of: Collection[Tensor] | None = None
        """Inside `last_backward`: the parameters whose gradients this pass completes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.before_forward()
        return self.watch_outputs(self.module(*args, **kwargs))

    def before_forward(self) -> None:
        if not (self.training and torch.is_grad_enabled()):
            return
        if self._round_is_open and not backward_is_running():  # else it is being recomputed
            if self.manual:
                raise UserError(
                    "backward() ran, and finish_gradient_synchronization() was not called before the next forward: "
                    "call it between backward() and optimizer.step(), or leave out manual=True"
                )
            self.zero_grad()  # a backward that failed: on every rank alike, or the others would wait for it
        self._forward_ran = True
        # As in DDP: buffers are not broadcast before a forward that follows one under no_sync.
        if self._buffers_may_differ:
            broadcast_buffers(self.module, self.group)
        self._buffers_may_differ = self._synchronizing

    def watch_outputs(self, outputs: Any) -> Any:
        """Hook the outputs, to notice a backward pass as soon as it begins."""
        if torch.is_grad_enabled():
            for value in tree_flatten(outputs)[0]:
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(lambda _: self.backward_began())
        return outputs

    def backward_began(self) -> None:
        """Open a round, unless one is open."""
        if self._synchronizing and not self._round_is_open:
            self._round_is_open = True
            if not self.manual:
                when_backward_is_over(self._backward_is_over)

    def _backward_is_over(self) -> None:
        if self._round_is_open:
            self.finish_gradient_synchronization()

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Make every gradient the mean over the ranks. `backward()` has done it, unless `manual` was asked for."""
        if not self._synchronizing:
            return
        if self.manual or self._round_is_open or self._forward_ran:
            self._round_is_open = self._forward_ran = False
            self.close_round()

    @abstractmethod
    def close_round(self) -> None:
        """Issue the remaining reductions, wait for all, and set the averaged gradients. Every rank must call it."""

    def watch(self, parameter: Tensor) -> None:
        """Have autograd call `gradient_ready` each time it has added to a parameter's gradient.

        The hook holds only a weak reference to the wrapper: the module, and its hooks with it, may outlive the wrapper.
        """
        weak_self = weakref.ref(self)

        def accumulated(parameter: Tensor) -> None:
            wrapper = weak_self()
            if wrapper is None or not wrapper._synchronizing:
                return
            if wrapper._last_of is not None and parameter not in wrapper._last_of:
                return  # this pass does not complete its gradient
            wrapper.backward_began()
            wrapper.gradient_ready(parameter)

        parameter.register_post_accumulate_grad_hook(accumulated)

    def gradient_ready(self, parameter: Tensor) -> None:
        """A parameter's gradient is complete on this rank; a bucket whose gradients are all complete is reduced."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates each rank's unreduced gradients; the next backward outside averages the sum."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @contextmanager
    def last_backward(self, complete: Collection[Tensor], pending: Collection[Tensor] | None) -> Iterator[None]:
        """Around the last of several backward passes; the earlier ones were under `no_sync`. For pipelines, where one
        pass reaches only some of the parameters. With `manual` only: `finish_gradient_synchronization()` ends the step.

        `complete`: parameters whose gradients no later pass adds to. `pending`: those of them that this one adds to;
        None: all.
        """
        assert self.manual, "the end of this pass is not the end of the step's backward"
        pending = complete if pending is None else pending
        self._last_of = pending
        try:
            for parameter in complete:
                if parameter not in pending:
                    self.backward_began()
                    self.gradient_ready(parameter)
            yield
        finally:
            self._last_of = None


class Flags:
    """Flags, all-reduced between the hosts: which parameters any rank has used, and whether any has late gradients."""

    def __init__(self, used: list[bool], late: bool, device: torch.device, group: Group) -> None:
        self._flags = torch.tensor([*used, late], dtype=torch.float32, device=flag_device(group, device))
        self._pending = all_reduce_async(self._flags, group=group, purpose="flags")

    def read(self) -> tuple[list[bool], bool]:
        """(which parameters any rank has used, whether any rank has late gradients)."""
        self._pending.wait()
        *used, late = (self._flags > 0).tolist()
        return used, late


# ---- what ranks must agree on before they start -------------------------------------------------------------


_known_equal = False


@contextmanager
def models_are_equal() -> Iterator[None]:
    """Inside, ranks are known to have the same model with the same weights: nothing is checked, nothing broadcast."""
    global _known_equal
    before, _known_equal = _known_equal, True
    try:
        yield
    finally:
        _known_equal = before


def broadcasts_weights() -> bool:
    """Whether a wrapper has to give every rank the first rank's weights."""
    return not _known_equal


def check_same_model(module: nn.Module, group: GroupLike = None) -> None:
    """Refuse, on every rank alike, models that differ between ranks: their collectives would mismatch or hang."""
    if _known_equal:
        return
    mine = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in module.named_parameters()]
    if len(set(all_gather_objects(sha256(repr(mine).encode()).hexdigest(), group))) == 1:
        return
    everyone = all_gather_objects(mine, group)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        if len(theirs) != len(everyone[0]):
            raise UserError(
                f"rank {rank} has {len(theirs)} parameters and rank 0 has {len(everyone[0])}: build the same model"
            )
        a, b = next(pair for pair in zip(theirs, everyone[0], strict=True) if pair[0] != pair[1])
        raise UserError(f"rank {rank} has parameter {a} where rank 0 has {b}: build the same model on every rank")


def check_experts_are_averaged(module: nn.Module, group: Group, wrapper: str) -> None:
    """An expert's gradient is a sum over the ranks; a wrapper that averages needs it divided like all others."""
    for name, mixture in mixtures_in(module).items() if group.size > 1 else ():
        if getattr(mixture.exchange, "sums_gradients", False):
            raise UserError(
                f"the gradients of {name or 'the'} experts are sums over the ranks, and {wrapper} averages; spread "
                f'them by lockstep.expert_parallel(module, gradients="mean")'
            )
        if mixture.tally.averaged_over not in (1, group.size):
            raise UserError(
                f"the gradients of {name or 'the'} experts are parts of a mean over {mixture.tally.averaged_over} "
                f"ranks, and {wrapper} averages over {group.size}; give both the same ranks: "
                f"lockstep.expert_parallel(module, group, replicas=those with the same experts)"
            )


@torch.no_grad()
def broadcast_module(module: nn.Module, group: GroupLike = None) -> None:
    """Give every rank the first rank's parameters, frozen ones too, and buffers: all ranks that hold a copy."""
    for tensor in [*module.parameters(), *module.buffers()]:
        broadcast_tensor(tensor, replicas_of(tensor, group_of(group)))


@torch.no_grad()
def broadcast_tensor(tensor: Tensor, group: GroupLike = None) -> None:
    """Copy the first rank's tensor to all, in place, also if it is not contiguous; of a DTensor, the local shard."""
    if _known_equal or group_of(group).size == 1:
        return
    mine = local(tensor.data)
    if mine.is_contiguous():
        broadcast(mine, group=group, purpose="parameters")
    else:
        mine.copy_(broadcast(mine.contiguous(), group=group, purpose="parameters"))


@torch.no_grad()
def broadcast_buffers(module: nn.Module, group: GroupLike = None) -> None:
    """Before a forward pass: all ranks start from the first one's running statistics, one broadcast per dtype."""
    if group_of(group).size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = broadcast(torch.cat([b.reshape(-1) for b in buffers]), group=group, purpose="buffers")
        for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))
