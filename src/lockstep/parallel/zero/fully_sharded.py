"""ZeRO stage 3 by hand: parameters, gradients and optimizer state are all spread over the ranks.

The model is cut into units (by default its blocks). A rank holds one n-th of every unit, and a whole unit only while it
computes. How the communication goes, per step, with three units:

    forward                      | compute 0    | compute 1    | compute 2
        all-gathers in flight  0 |     1        |     2        |
        resharded                               | 0            | 1            | 2

    backward                     | compute 2    | compute 1    | compute 0
        all-gathers in flight  2 |     1        |     0        |
        reduce-scatters in flight               |     2        |     1        |     0
        resharded                               | 2            | 1            | 0

1. before a unit computes, its pieces are all-gathered (Ψ(n-1)/n bytes over all units); the all-gather of the next unit
   is in flight meanwhile, in forward and in backward: at most `prefetch` units ahead
2. when its forward is over a unit is resharded: its memory is released. Backward gathers it again: another Ψ(n-1)/n
3. when a unit's backward is over, its unsharded gradients are reduce-scattered: each rank receives the mean of its part
   (Ψ(n-1)/n), and the unsharded ones are released

3Ψ(n-1)/n in all (Ψ: bytes of all parameters, in the dtype that is sent), for memory of (parameters + gradients +
optimizer state) / n, one or two whole units, and two buffers of gradients. Parameters outside every block are held by
every rank and their gradients all-reduced; so are those that two units share.

Tracking progress. Forward hooks fire when a block begins and ends; a block's backward begins with the gradient
of its output (a tensor hook) and ends with that of its input (`_EndOfBackward`, an identity before the block). The
order of the blocks is recorded in each forward pass. Backward goes through it in reverse, and `_cursor` is
the block that is next: ranks must issue their collectives in the same order, so where this rank's loss does not depend
on a block, `_catch_up` issues the block's collectives anyway.

`shard_unit.py` is the unit: sharded and unsharded parameters, their memory; `sharded_module.py` the module cut into
units; `gradient_buffers.py` where gradients are reduced. This file decides when they are called.
"""

import weakref
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from lockstep.layout.group import GroupLike, group_of
from lockstep.models.blocks import ShardBy
from lockstep.models.recompute import when_backward_is_over
from lockstep.parallel.gradient_norm import clip_grad_norm_
from lockstep.parallel.zero.shard_unit import UnitPlacement, UnitState
from lockstep.parallel.zero.sharded_module import CPU, Initialize, ShardedBlock, ShardedModule, fill_later


class Pass(Enum):
    """What the module is doing, as far as it matters here."""

    FORWARD = "forward, or nothing"
    BACKWARD = "backward: a forward of a block is now a recomputation"


class FullyShardedDataParallel(ShardedModule):
    """Wraps a module; call it like the module.

        model = lockstep.FullyShardedDataParallel(model, shard=nn.Linear)
        optimizer = torch.optim.AdamW(model.parameters())
        model(inputs).sum().backward()  # now p.grad is this rank's piece of the mean
        optimizer.step()
        optimizer.zero_grad()

    All ranks start from the first rank's weights; between uses a rank holds only its piece of each unit.
    """

    def __init__(
        self,
        module: nn.Module,
        shard: ShardBy | None = None,
        compute_dtype: torch.dtype | None = None,
        process_group: GroupLike = None,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        device: torch.device | None = None,
        offload: bool = False,
        initialize: Initialize | None = None,
        output_dtype: torch.dtype | None = torch.float32,
        reduce_dtype: torch.dtype | None = torch.float32,
        manual: bool = False,
    ) -> None:
        """`shard`: the classes of modules that become units, or a predicate; the module itself may be one.

        `compute_dtype`: compute and all-gather in it; parameters and their gradients keep their dtype. `reduce_dtype`:
        reduce gradients in it; None: in `compute_dtype`. `output_dtype`: cast the outputs to it; None: leave them in
        `compute_dtype`. `offload`: keep pieces in the host's memory. `device`: where to compute, for a module on the
        meta device; `initialize` then fills each submodule (default: its `reset_parameters`), one unit at a time.
        `manual`: gradients are the mean only after `finish_gradient_synchronization()`.
        """
        device = device or _device_of(module)
        placement = UnitPlacement(device, CPU if offload else device, compute_dtype, reduce_dtype)
        super().__init__(module, shard, group_of(process_group, "shard"), placement, initialize, manual)
        self.reshard_after_forward, self.prefetch = reshard_after_forward, prefetch
        self.output_dtype = output_dtype if compute_dtype is not None else None
        self.shard_by, self.offload = shard, offload
        self._pass = Pass.FORWARD
        self._order: list[ShardedBlock] = []  # in the order in which their forward began, in the last pass
        self._order_before: list[ShardedBlock] = []
        self._cursor = -1  # index in `_order` of the block whose backward is next: from the last to the first
        self._hooks = [hook for block in self.blocks if not block.is_root for hook in self._watch(block)]

    @torch.no_grad()
    def __deepcopy__(self, memo: dict[int, Any]) -> "FullyShardedDataParallel":
        """A copy with the same weights and sharding, without gradients: for an average of the weights, for example.
        Every rank must make the copy together.
        """
        module = self.unfilled_copy(memo, self._hooks)
        other = FullyShardedDataParallel(
            module,
            self.shard_by,
            self.placement.compute_dtype,
            self.group,
            self.reshard_after_forward,
            self.prefetch,
            self.placement.device,
            self.offload,
            fill_later,
            self.output_dtype,
            self.placement.reduce_dtype,
            self.manual,
        )
        memo[id(self)] = other
        for mine, theirs in zip(self.units(), other.units(), strict=True):
            theirs.shard.copy_(mine.shard)
        return other.train(self.training)

    # ---- forward ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.before_forward()
        self._order_before, self._order = self._order or self._order_before, []
        self._pass = Pass.FORWARD
        self.follow_freezing()
        for unit in self.units():
            unit.expire()
        with self.outside_unsharded():
            args, kwargs = self.cast((args, kwargs), self.placement.compute_dtype)
            outputs = self.module(*args, **kwargs)
        self._cursor = len(self._order) - 1 if torch.is_grad_enabled() else -1
        return self.watch_outputs(self.cast(outputs, self.output_dtype))

    def _watch(self, block: ShardedBlock) -> tuple[RemovableHandle, RemovableHandle]:
        """Hook the block's forward, before and after; by weak references, as the module may outlive the wrapper."""
        weak_self = weakref.ref(self)

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            wrapper = weak_self()
            return wrapper._before_block(block, args, kwargs) if wrapper is not None else None

        def after(_: nn.Module, args: Any, outputs: Any) -> Any:
            wrapper = weak_self()
            return wrapper._after_block(block, outputs) if wrapper is not None else None

        return (
            block.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            block.module.register_forward_hook(after),
        )

    def _before_block(self, block: ShardedBlock, args: Any, kwargs: Any) -> Any:
        block.was_whole = block.units[0].state is UnitState.UNSHARDED
        if self._pass is Pass.BACKWARD and block in self._order:  # recomputed: first what was skipped before it
            self._catch_up(self._order.index(block))
        block.unshard()
        if self._pass is Pass.FORWARD:  # else it is recomputed, for activation checkpointing
            self._prefetch_in_forward(block)
        args, kwargs = self.cast((args, kwargs), self.placement.compute_dtype)
        if not torch.is_grad_enabled():
            return args, kwargs
        flat, shape = tree_flatten((args, kwargs))
        differentiable = [i for i, v in enumerate(flat) if isinstance(v, Tensor) and v.requires_grad]
        if differentiable:
            passed = _EndOfBackward.apply(self, block, *(flat[i] for i in differentiable))
            for index, value in zip(differentiable, passed, strict=True):
                flat[index] = value
        args, kwargs = tree_unflatten(flat, shape)
        return args, kwargs

    def _prefetch_in_forward(self, block: ShardedBlock) -> None:
        """Issue the all-gathers of the next blocks, assuming the order of the last forward pass."""
        if block not in self._order:
            self._order.append(block)
        if block in self._order_before:
            start = self._order_before.index(block) + 1
            for following in self._order_before[start : start + self.prefetch]:
                following.prefetch()

    def _after_block(self, block: ShardedBlock, outputs: Any) -> Any:
        no_backward = not torch.is_grad_enabled() and not block.was_whole
        if self._pass is Pass.FORWARD and (self.reshard_after_forward or no_backward):
            block.reshard()
        for value in tree_flatten(outputs)[0]:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _: self._before_backward_of(block))
        return outputs

    # ---- backward --------------------------------------------------------------------------------------------

    def backward_began(self) -> None:
        super().backward_began()
        if self._pass is Pass.FORWARD:
            self._pass = Pass.BACKWARD
            when_backward_is_over(self._end_backward)  # under no_sync too, where no round is closed
        for unit in self.outside():
            unit.unshard()  # still unsharded, unless another backward has run in between

    def _before_backward_of(self, block: ShardedBlock) -> None:
        self.backward_began()  # the first sign, where a loss depends on no output of the module
        position = self._order.index(block) if block in self._order else -1
        if position >= 0:
            self._catch_up(position)
        block.unshard()
        self._prefetch_in_backward(position)

    def _prefetch_in_backward(self, position: int) -> None:
        for following in reversed(self._order[max(0, position - self.prefetch) : max(0, position)]):
            following.prefetch()

    def _catch_up(self, position: int) -> None:
        """Blocks between the cursor and `position` have no observable end: their inputs need no gradient, or this
        rank's loss does not depend on them. Other ranks' may, so the same collectives are issued here, in the same
        order.
        """
        while self._cursor > position:
            block = self._order[self._cursor]
            block.prefetch()
            self._prefetch_in_backward(self._cursor)
            self._after_backward_of(block)

    def _after_backward_of(self, block: ShardedBlock) -> None:
        """The gradients with respect to the block's inputs are ready, so its parameters' are too."""
        for unit in block.units:
            if unit.trainable and self._synchronizing:
                self.reduce(unit)
        block.reshard()
        if 0 <= self._cursor < len(self._order) and self._order[self._cursor] is block:
            self._cursor -= 1

    # ---- when backward is over -------------------------------------------------------------------------------

    def finish_gradient_synchronization(self) -> None:
        """Make every `p.grad` this rank's piece of the mean; `backward()` has done it, except with `manual`."""
        if self._synchronizing and (self.manual or self._round_is_open or self._forward_ran):
            self._catch_up(-1)  # also on a rank that saw nothing of a backward: the others have issued all of this
        self._end_backward()
        super().finish_gradient_synchronization()

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Finish blocks whose end of backward was not observed (their inputs need no gradient); reshard all units."""
        if self._pass is Pass.BACKWARD:
            self._catch_up(-1)
            self._pass = Pass.FORWARD
        for unit in self.units():
            unit.reshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the module's; also drops a round that was begun and not closed, on every rank alike."""
        if self._round_is_open:
            self._round_is_open = False
            self._end_backward()
            with torch.no_grad():
                self.close_round()
        for unit in self.units():
            unit.forget_gradients()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """`lockstep.clip_grad_norm_(self, max_norm)`."""
        return clip_grad_norm_(self, max_norm)


class _EndOfBackward(torch.autograd.Function):
    """Passes a block's inputs on unchanged; in backward, their gradients are ready when the block's are."""

    @staticmethod
    def forward(
        ctx: Any, wrapper: "FullyShardedDataParallel", block: ShardedBlock, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.wrapper, ctx.block = wrapper, block
        ctx.set_materialize_grads(False)  # an input that is not used gets no gradient, not a gradient of zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.wrapper._after_backward_of(ctx.block)
        return None, None, *gradients


def _device_of(module: nn.Module) -> torch.device:
    """Where its parameters are; for one on the meta device, a GPU if there is one."""
    device = next((p.device for p in module.parameters()), CPU)
    if device.type != "meta":
        return device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
