"""ZeRO stage 3 by hand: parameters, gradients and optimizer state are all spread over the ranks.

The model is cut into units (by default its blocks). A rank holds one n-th of every unit, and a whole unit only while it
computes. How the communication goes, per step, with three units:

    forward    gather 0 | compute 0   | compute 1   | compute 2
                        | gather 1    | gather 2    |             a unit is freed when its forward is over
    backward            | compute 2   | compute 1   | compute 0
               gather 2 | gather 1    | gather 0    | reduce 0    and again when its backward is over
                                      | reduce 2    | reduce 1

1. before a unit computes, its pieces are all-gathered (Ψ(n-1)/n bytes over all units); the next unit's are on their way
   meanwhile, in forward and in backward, and at most `prefetch` units ahead
2. backward needs the whole unit again: another Ψ(n-1)/n
3. when a unit's backward is over, its whole gradients are reduce-scattered: each rank receives the mean of its own part
   (Ψ(n-1)/n), and the whole ones are gone

3Ψ(n-1)/n in all, for memory of (parameters + gradients + optimizer state) / n and one or two units. Parameters outside
every unit are held by every rank and their gradients all-reduced; so are those that two units share.

`shard_unit.py` is the unit: its two bodies, its buffers; `sharded_module.py` the module cut into units. This file is
when which of them does what.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.comm.collectives import Group, all_reduce, group_size, new_buffer
from lockstep.parallel.blocks import ShardBy
from lockstep.parallel.shard_unit import ShardUnit
from lockstep.parallel.sharded_module import Block, Initialize, ShardedModule
from lockstep.parallel.wrapper import Flags


class FullyShardedDataParallel(ShardedModule):
    """Wraps a module; call it like the module, and `finish_gradient_synchronization()` between backward and step.

    model = FullyShardedDataParallel(model, shard=Block)
    optimizer = torch.optim.AdamW(model.parameters())
    model(inputs).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        shard: ShardBy | None = None,
        compute_dtype: torch.dtype | None = None,
        process_group: Group = None,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        device: torch.device | None = None,
        offload: bool = False,
        initialize: Initialize | None = None,
        output_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        """`shard`: classes of modules, or a predicate, that become units; the module itself may be one.

        `compute_dtype`: compute and communicate in it; masters and their gradients stay as they are. `output_dtype`:
        what it then gives its outputs in; None: in `compute_dtype`. `offload`: keep pieces in the host's memory.
        `device`: where to compute, for a module on the meta device; `initialize` then fills each submodule (default:
        its `reset_parameters`), one unit at a time.
        """
        super().__init__(module, shard, compute_dtype, process_group, device, offload, initialize)
        self.reshard_after_forward, self.prefetch = reshard_after_forward, prefetch
        self.output_dtype = output_dtype if compute_dtype is not None else None
        self._order: list[Block] = []  # as their forward began, in the last pass
        self._order_before: list[Block] = []
        self._backward_runs = False
        self._next = -1  # in the order, whose backward is to come: it goes from the last to the first
        self._gradient_buffers = self._make_buffers()
        self._in_buffer: dict[torch.dtype, ShardUnit] = {}
        for block in self.blocks:
            if not block.is_root:
                self._watch(block)

    def _make_buffers(self) -> dict[torch.dtype, Tensor]:
        """One buffer of whole gradients per dtype, which all units use in turn.

        One is enough: while it is on its way, autograd produces the next unit's in memory of their own.
        """
        lengths: dict[torch.dtype, int] = {}
        for unit in self.trained_units():
            lengths[unit.dtype] = max(lengths.get(unit.dtype, 0), unit.layout.length)
        return {dtype: new_buffer(length, dtype, self._device, self.group) for dtype, length in lengths.items()}

    # ---- forward ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.synchronize_buffers()
        self._order_before, self._order = self._order or self._order_before, []
        self._backward_runs = False
        outside = self._outside()
        whole_before = [unit.gathered for unit in outside]
        for unit in outside:
            unit.use()
        args, kwargs = self._cast((args, kwargs), self.compute_dtype)
        outputs = self.module(*args, **kwargs)
        self._next = len(self._order) - 1
        if not torch.is_grad_enabled():
            for unit, was_whole in zip(outside, whole_before, strict=True):
                if not was_whole:  # else the backward of an earlier forward needs it
                    unit.free()
        outputs = self._cast(outputs, self.output_dtype)
        for value in tree_flatten(outputs)[0]:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _: self._backward_begins())
        return outputs

    def _outside(self) -> list[ShardUnit]:
        """What is whole from forward to backward: all that lies outside the blocks."""
        return [*(unit for block in self.blocks if block.is_root for unit in block.units), *self.rest]

    def _cast(self, values: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None:
            return values
        flat, shape = tree_flatten(values)
        return tree_unflatten([v.to(dtype) if _is_float(v) else v for v in flat], shape)

    def _watch(self, block: Block) -> None:
        """Be called before and after the block's forward; weakly, as the module may outlive the wrapper."""
        weak_self = weakref.ref(self)

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            wrapper = weak_self()
            return wrapper._before_forward(block, args, kwargs) if wrapper is not None else None

        def after(_: nn.Module, args: Any, outputs: Any) -> Any:
            wrapper = weak_self()
            return wrapper._after_forward(block, outputs) if wrapper is not None else None

        block.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        block.module.register_forward_hook(after)

    def _before_forward(self, block: Block, args: Any, kwargs: Any) -> Any:
        block.whole_before = block.units[0].gathered
        block.use()
        if not self._backward_runs:  # else it is recomputed, for activation checkpointing
            self._prefetch_after(block)
        args, kwargs = self._cast((args, kwargs), self.compute_dtype)
        if not torch.is_grad_enabled():
            return args, kwargs
        flat, shape = tree_flatten((args, kwargs))
        differentiable = [i for i, v in enumerate(flat) if isinstance(v, Tensor) and v.requires_grad]
        if differentiable:
            passed = _BackwardIsOver.apply(self, block, *(flat[i] for i in differentiable))
            for index, value in zip(differentiable, passed, strict=True):
                flat[index] = value
        args, kwargs = tree_unflatten(flat, shape)
        return args, kwargs

    def _prefetch_after(self, block: Block) -> None:
        """Begin to gather what comes next, if forward goes as it went last time."""
        if block not in self._order:
            self._order.append(block)
        if block in self._order_before:
            start = self._order_before.index(block) + 1
            for following in self._order_before[start : start + self.prefetch]:
                following.gather()

    def _after_forward(self, block: Block, outputs: Any) -> Any:
        passing = self.reshard_after_forward or (not torch.is_grad_enabled() and not block.whole_before)
        if passing and not self._backward_runs:
            block.free()
        for value in tree_flatten(outputs)[0]:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _: self._before_backward(block))
        return outputs

    # ---- backward --------------------------------------------------------------------------------------------

    def _backward_begins(self) -> None:
        self._backward_runs = True
        for unit in self._outside():
            unit.use()  # still whole, unless another backward has come in between

    def _before_backward(self, block: Block) -> None:
        self._backward_runs = True
        position = self._order.index(block) if block in self._order else -1
        self._pass_over(position)
        block.use()
        self._prefetch_before(position)

    def _prefetch_before(self, position: int) -> None:
        for following in reversed(self._order[max(0, position - self.prefetch) : max(0, position)]):
            following.gather()

    def _pass_over(self, position: int) -> None:
        """Blocks that backward has not come to, though it has come to an earlier one: this rank's loss does not depend
        on them. Other ranks' may, so their collectives are issued here too, in the same order.
        """
        while self._next > position >= 0:
            self._come_to(self._order[self._next])

    def _come_to(self, block: Block) -> None:
        block.gather()
        self._prefetch_before(self._next)
        self._after_backward(block)

    def _after_backward(self, block: Block) -> None:
        """The gradients with respect to the block's inputs are there, so its parameters' are too."""
        for unit in block.units:
            if unit.trainable and self._synchronizing:
                self._reduce(unit)
        block.free()
        if 0 <= self._next < len(self._order) and self._order[self._next] is block:
            self._next -= 1

    def _reduce(self, unit: ShardUnit) -> None:
        if unit.dtype in self._in_buffer:
            self._in_buffer[unit.dtype].finish_reduce()  # its gradients still lie there
        self._in_buffer[unit.dtype] = unit
        unit.reduce(self._gradient_buffers[unit.dtype])

    # ---- between backward and the optimizer ------------------------------------------------------------------

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Make every `p.grad` this rank's piece of the mean, added to what earlier calls since `zero_grad` brought.

        Every rank must call it. What has been reduced during backward is awaited, the rest is reduced now: units whose
        inputs need no gradient, and those that no loss depends on. A unit that computed after it was reduced (a second
        backward) has gradients left: as long as any rank has such, all go another round.
        """
        if self._backward_runs:
            self._finish_backward()
        for unit in self.units():
            unit.free()
        if not self._synchronizing:
            return
        units = self.trained_units()
        late = True
        while late:
            for unit in reversed(units):
                if not unit.reduced:
                    self._reduce(unit)
            late_here = any(unit.has_gradients() for unit in units)
            flags = Flags([used for unit in units for used in unit.used], late_here, self._device, self.group)
            for unit in units:
                unit.finish_reduce()
                unit.reduced = False
            used, late = flags.read()
        position = 0
        for unit in units:
            unit.hand_over(used[position : position + len(unit.used)])
            position += len(unit.used)

    def _finish_backward(self) -> None:
        """Come to the blocks that backward has not ended: it does not say when, if their inputs need no gradient."""
        while self._next >= 0:
            self._come_to(self._order[self._next])
        self._backward_runs = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        for unit in self.units():
            unit.forget_gradients()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Of the whole model's gradient: pieces are squared and added up over the ranks, the rest counts once."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for unit in self.units():
            gradients = [p.grad for p in unit.parameters if p.grad is not None and p.grad.numel()]
            share = 1.0 / group_size(self.group) if unit.replicated else 1.0
            if gradients:
                squares += nn.utils.get_total_norm(gradients).to(squares) ** 2 * share
        return all_reduce(squares, group=self.group, purpose="norm").sqrt()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch's, by the norm over all ranks; returns the norm."""
        norm = self.gradient_norm()
        scale = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        return norm


class _BackwardIsOver(torch.autograd.Function):
    """Passes a block's inputs on unchanged; in backward, their gradients come when the block's are all there."""

    @staticmethod
    def forward(ctx: Any, wrapper: "FullyShardedDataParallel", block: Block, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.wrapper, ctx.block = wrapper, block
        ctx.set_materialize_grads(False)  # an input that is not used gets no gradient, not a gradient of zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.wrapper._after_backward(ctx.block)
        return None, None, *gradients


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
