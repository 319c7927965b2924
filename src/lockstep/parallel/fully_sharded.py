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

`shard_unit.py` is the unit: its two bodies, its buffers. This file is when which of them does what.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.comm.collectives import (
    Group,
    all_reduce,
    all_reduce_async,
    broadcast,
    group_rank,
    group_size,
    new_buffer,
)
from lockstep.errors import UserError
from lockstep.parallel.blocks import ShardBy, chosen_blocks
from lockstep.parallel.data_parallel import broadcast_buffers, broadcast_tensor, check_same_model
from lockstep.parallel.flat import Piece
from lockstep.parallel.shard_unit import Owner, ShardUnit

CPU = torch.device("cpu")
BATCH_NORM = nn.modules.batchnorm._BatchNorm
Initialize = Callable[[nn.Module], None]


class Block:
    """A module whose parameters are gathered together: its units (one per dtype, trained and frozen apart)."""

    def __init__(self, module: nn.Module, units: list[ShardUnit], is_root: bool) -> None:
        self.module, self.units, self.is_root = module, units, is_root
        self.whole_before = False
        """Before its forward began."""

    def gather(self) -> None:
        for unit in self.units:
            unit.gather()

    def use(self) -> None:
        for unit in self.units:
            unit.use()

    def free(self) -> None:
        for unit in self.units:
            unit.free()


class FullyShardedDataParallel(nn.Module):
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
    ) -> None:
        """`shard`: classes of modules, or a predicate, that become units; the module itself may be one.

        `compute_dtype`: compute and communicate in it; masters and their gradients stay as they are. `offload`: keep
        pieces in the host's memory. `device`: where to compute, for a module on the meta device; `initialize` then
        fills each submodule (default: its `reset_parameters`), one unit at a time.
        """
        super().__init__()
        self.module, self.group, self.prefetch = module, process_group, prefetch
        self.reshard_after_forward, self.compute_dtype = reshard_after_forward, compute_dtype
        self._size = group_size(process_group)
        self._synchronizing = True
        self._device = device or next((p.device for p in module.parameters()), torch.device("cpu"))
        if self._device.type == "meta":
            self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
        self._shard_device = CPU if offload else self._device
        check_same_model(module, process_group)
        self.blocks: list[Block] = []
        self.rest: list[ShardUnit] = []
        self._make_units(shard, initialize)
        self._broadcast_buffers_once()
        self._order: list[Block] = []  # as their forward began, in the last pass
        self._order_before: list[Block] = []
        self._backward_runs = False
        self._next = -1  # in the order, whose backward is to come: it goes from the last to the first
        self._gradient_buffers = self._make_buffers()
        self._in_buffer: dict[torch.dtype, ShardUnit] = {}
        for block in self.blocks:
            if not block.is_root:
                self._watch(block)

    # ---- which parameter belongs where -----------------------------------------------------------------------

    def _make_units(self, shard: ShardBy | None, initialize: Initialize | None) -> None:
        chosen = dict(chosen_blocks(self.module, shard))
        places, homes = self._homes(chosen)
        for name, module in chosen.items():
            mine = {p: places[p] for p in places if homes[p] == {name}}
            units = self._units(mine, replicated=False, initialize=initialize)
            if units:
                self.blocks.append(Block(module, units, is_root=module is self.module))
        outside = {p: places[p] for p in places if len(homes[p]) > 1 or homes[p] == {None}}
        self.rest = self._units(outside, replicated=True, initialize=initialize)

    def _homes(
        self, chosen: dict[str, nn.Module]
    ) -> tuple[dict[nn.Parameter, list[Owner]], dict[nn.Parameter, set[str | None]]]:
        """Of every parameter: all its places, and the innermost chosen modules that those lie in."""
        places: dict[nn.Parameter, list[Owner]] = {}
        homes: dict[nn.Parameter, set[str | None]] = {}
        for path, module in self.module.named_modules(remove_duplicate=False):
            around = [n for n in chosen if n == path or n == "" or path.startswith(n + ".")]
            home = max(around, key=len, default=None)
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                homes.setdefault(parameter, set()).add(home)  # a module that stands in two blocks has two
                if (module, name) not in places.setdefault(parameter, []):
                    places[parameter].append((module, name))
        return places, homes

    def _units(
        self, owners: dict[nn.Parameter, list[Owner]], replicated: bool, initialize: Initialize | None
    ) -> list[ShardUnit]:
        """One for each dtype, trained and frozen apart. Batch norms, whose statistics are fp32, compute in fp32."""
        alike: dict[tuple[torch.dtype, torch.dtype | None, bool], dict[nn.Parameter, list[Owner]]] = {}
        for parameter, places in owners.items():
            dtype = None if all(isinstance(m, BATCH_NORM) for m, _ in places) else self.compute_dtype
            alike.setdefault((parameter.dtype, dtype, parameter.requires_grad), {})[parameter] = places
        empty = [module for p, places in owners.items() if p.device.type == "meta" for module, _ in places]
        for parameter in owners:
            if parameter.device.type != "meta":
                broadcast_tensor(parameter, self.group)
        devices = self._device, self._shard_device
        units = [
            ShardUnit(owned, self.group, dtype, *devices, replicated=replicated)
            for (_, dtype, _), owned in alike.items()
        ]
        if empty:
            self._initialize(units, list(dict.fromkeys(empty)), initialize or reset_parameters)
        return units

    @torch.no_grad()
    def _initialize(self, units: list[ShardUnit], empty: list[nn.Module], initialize: Initialize) -> None:
        """Fill what was on the meta device: whole for a moment, then each rank keeps its piece of rank 0's."""
        for unit in units:
            unit.use()
        for module in empty:
            self._give_buffers(module)
            initialize(module)
        for unit in units:
            for body in unit.bodies:
                broadcast(body.data, group=self.group, purpose="parameters")
            unit.keep_own_piece()
            unit.free()

    def _give_buffers(self, module: nn.Module) -> None:
        """Memory where we compute; what was on the meta device has no values to keep."""
        for key, buffer in module._buffers.items():
            if buffer is not None:
                on_meta = buffer.device.type == "meta"
                module._buffers[key] = (
                    torch.zeros_like(buffer, device=self._device) if on_meta else buffer.to(self._device)
                )

    def _broadcast_buffers_once(self) -> None:
        for module in self.module.modules():
            self._give_buffers(module)
        broadcast_buffers(self.module, self.group)

    def _make_buffers(self) -> dict[torch.dtype, Tensor]:
        """One buffer of whole gradients per dtype, which all units use in turn.

        One is enough: while it is on its way, autograd produces the next unit's in memory of their own.
        """
        lengths: dict[torch.dtype, int] = {}
        for unit in self.trained_units():
            lengths[unit.dtype] = max(lengths.get(unit.dtype, 0), unit.layout.length)
        return {dtype: new_buffer(length, dtype, self._device, self.group) for dtype, length in lengths.items()}

    def units(self) -> list[ShardUnit]:
        return [*(unit for block in self.blocks for unit in block.units), *self.rest]

    def trained_units(self) -> list[ShardUnit]:
        return [unit for unit in self.units() if unit.trainable]

    # ---- forward ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._synchronizing and self.training and torch.is_grad_enabled():
            broadcast_buffers(self.module, self.group)
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
        outputs = self._cast(outputs, torch.float32 if self.compute_dtype is not None else None)
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
            flags = torch.tensor([*(used for unit in units for used in unit.used), late_here], dtype=torch.float32)
            flags = flags.to(self._device)
            telling = all_reduce_async(flags, group=self.group, purpose="flags")
            for unit in units:
                unit.finish_reduce()
                unit.reduced = False
            telling.wait()
            *used, late = (flags > 0).tolist()
        position = 0
        for unit in units:
            unit.hand_over(used[position : position + len(unit.used)])
            position += len(unit.used)

    def _finish_backward(self) -> None:
        """Come to the blocks that backward has not ended: it does not say when, if their inputs need no gradient."""
        while self._next >= 0:
            self._come_to(self._order[self._next])
        self._backward_runs = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds to each rank's own whole gradients; the next backward outside averages the sum."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

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
            share = 1.0 / self._size if unit.replicated else 1.0
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

    # ---- state -----------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """With the module's own names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    @torch.no_grad()
    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of every parameter, in the master's dtype; tied ones come under each of their names.

        Every rank must go through it. One unit is whole at a time: copy what is to stay.
        """
        names = self._names()
        for unit in self.units():
            for parameter, whole in zip(unit.parameters, unit.whole_masters(), strict=True):
                yield from ((name, whole) for name in names[parameter])

    @torch.no_grad()
    def full_state_dict(self, only_rank: int | None = None) -> dict[str, Tensor]:
        """The module's state_dict, as if it were not sharded; on every rank, or on the host of one only.

        A rank that keeps nothing needs memory for its share and one unit.
        """
        keep = only_rank is None or group_rank(self.group) == only_rank
        found: dict[str, Tensor] = {}
        for name, whole in self.whole_parameters():
            if keep:
                found[name] = whole.clone() if only_rank is None else whole.to(CPU, copy=True)
        state = self.module.state_dict()
        return {name: found.get(name, value.detach().clone()) for name, value in state.items()} if keep else {}

    def unreduced_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """This rank's own whole gradients, by name, where `no_sync` has left them."""
        names = self._names()
        for unit in self.trained_units():
            for index in unit.trainable:
                yield names[unit.parameters[index]][0], unit.bodies[index].grad

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients by name, of the parameters that have one. For looking at: training never needs them."""
        names, found = self._names(), {}
        for unit in self.trained_units():
            gradients = unit.whole_gradients()
            for index in unit.trainable:
                if unit.parameters[index].grad is not None:
                    found[names[unit.parameters[index]][0]] = gradients[index]
        return found

    def pieces(self) -> Iterator[tuple[ShardUnit, str, nn.Parameter, torch.Size, Piece]]:
        """Every parameter that this rank holds anything of: its unit, first name, shape, and which part it holds."""
        names = self._names()
        for unit in self.units():
            for index, piece in unit.pieces.items():
                parameter = unit.parameters[index]
                yield unit, names[parameter][0], parameter, unit.shapes[index], piece

    def _names(self) -> dict[nn.Parameter, list[str]]:
        """Sharded or whole, a parameter is found under its names."""
        names: dict[nn.Parameter, list[str]] = {}
        places = {place: p for unit in self.units() for p, owners in unit.owners.items() for place in owners}
        for path, module in self.module.named_modules(remove_duplicate=False):
            for name in module._parameters:
                if (module, name) in places:
                    names.setdefault(places[module, name], []).append(f"{path}.{name}" if path else name)
        return names


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


def reset_parameters(module: nn.Module) -> None:
    """PyTorch's own way of filling a module's parameters."""
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise UserError(
            f"{type(module).__name__} is on the meta device and has no reset_parameters; give initialize=, a function "
            f"that fills one module's own parameters"
        )
    reset()
