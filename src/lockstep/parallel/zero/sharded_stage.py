"""ZeRO stage 3 for a stage of a pipeline: gathered once per step, kept for all micro-batches, reduced once.

Micro-batches follow each other through the same blocks. To gather a block for each of them, and to reduce its gradients
after each, would multiply the traffic by the number of micro-batches. So, per step:

1. `begin_step` issues the all-gathers of all blocks (Ψ(n-1)/n bytes), in the order of forward, and each block waits for
   its own. Later stages stand idle until the first micro-batch reaches them, and gather meanwhile
2. parameters stay unsharded, and gradients accumulate unsharded (in `reduce_dtype`), until the last backward pass
3. in the last pass that adds to a unit's gradients, the unit is reduce-scattered as soon as it is complete (Ψ(n-1)/n),
   from where they have accumulated: no unit waits for the buffer of another, which would hold up the pass and the
   message to the stage before
4. `finish_gradient_synchronization` reduces the rest, waits for all of it, and releases the unsharded parameters

2Ψ(n-1)/n in all, as ZeRO 1 and 2. Between steps a rank holds its n-th of parameters and optimizer state; during a step
it also holds the stage's unsharded parameters and gradients.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.layout.group import GroupLike, group_of
from lockstep.layout.region import Held
from lockstep.models.blocks import ShardBy
from lockstep.parallel.zero.shard_unit import ShardUnit, UnitPlacement, UnitState
from lockstep.parallel.zero.sharded_module import CPU, Initialize, ShardedBlock, ShardedModule


class ShardedStage(ShardedModule):
    """Wraps a stage; call it like the stage, under `no_sync` or `last_backward`."""

    def __init__(
        self,
        module: nn.Module,
        shard: ShardBy | None,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        process_group: GroupLike = None,
        offload: bool = False,
        initialize: Initialize | None = None,
    ) -> None:
        """As `FullyShardedDataParallel`'s."""
        placement = UnitPlacement(device, CPU if offload else device, compute_dtype, reduce_dtype)
        super().__init__(module, shard, group_of(process_group, "shard"), placement, initialize, manual=True)
        self._in_step = False
        """From the first training forward pass until gradients are reduced."""
        self._sequence = [block for block in self.blocks if not block.is_root]
        self._order: list[ShardUnit] = []
        self._issued = 0  # reductions of this step: always those of the first units
        self._missing: dict[ShardUnit, set[Tensor]] = {}
        self._places: dict[Tensor, tuple[ShardUnit, int]]
        self._places = {p: (unit, i) for unit in self.units() for i, p in enumerate(unit.unsharded)}
        self._watched: set[Tensor] = set()
        for block in self._sequence:
            block.module.register_forward_pre_hook(self._before_block(block), prepend=True, with_kwargs=True)
            block.module.register_forward_hook(self._after_block(block))

    # ---- forward ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.before_forward()
        if torch.is_grad_enabled() and not self._in_step:
            self.begin_step()
        with self.outside_unsharded():
            args, kwargs = self.cast((args, kwargs), self.placement.compute_dtype)
            return self.module(*args, **kwargs)

    @property
    def stays_unsharded(self) -> bool:
        return self._in_step

    def begin_step(self) -> None:
        """Issue the all-gathers of the whole stage."""
        self._in_step, self._issued = True, 0
        self.follow_freezing()
        for unit in (*self.outside(), *(unit for block in self._sequence for unit in block.units)):
            unit.prefetch()
        outside = self.outside()  # with what stages share, whose gradients are complete last
        blocks = [unit for block in reversed(self._sequence) for unit in block.units]
        self._order = [unit for unit in (*blocks, *outside) if unit.trainable]
        self._missing = {unit: {unit.unsharded[i] for i in unit.trainable} for unit in self._order}
        for unit in self._order:
            for index in unit.trainable:
                self._watch_gradient(unit, index)

    def _watch_gradient(self, unit: ShardUnit, index: int) -> None:
        parameter = unit.unsharded[index]
        if parameter in self._watched:
            return
        self._watched.add(parameter)
        if not unit.is_local:
            parameter.register_post_accumulate_grad_hook(lambda _: unit.unreduced.move(index))
        self.watch(parameter)

    def _before_block(self, block: ShardedBlock) -> Any:
        """Weak references are not needed: a stage and its wrapper are one."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            block.was_whole = block.units[0].state is UnitState.UNSHARDED
            block.unshard()
            return self.cast((args, kwargs), self.placement.compute_dtype)

        return before

    def _after_block(self, block: ShardedBlock) -> Any:
        def after(_: nn.Module, args: Any, outputs: Any) -> None:
            if not torch.is_grad_enabled() and not block.was_whole and not self.stays_unsharded:
                block.reshard()

        return after

    # ---- backward --------------------------------------------------------------------------------------------

    def gradient_ready(self, parameter: Tensor) -> None:
        """Units are reduced in the same order on all ranks, whatever order their gradients become complete in."""
        unit, _ = self._places[parameter]
        self._missing[unit].discard(parameter)
        while self._issued < len(self._order) and not self._missing[self._order[self._issued]]:
            self.reduce(self._order[self._issued])
            self._issued += 1

    def make_gradient_buffers(self) -> None:
        """None: every unit is reduced where its gradients have accumulated."""

    def reduce(self, unit: ShardUnit) -> None:
        if unit.is_local:
            unit.reduced = True
        else:
            unit.issue_reduce(unit.unreduced.buffer())

    def reduction_order(self) -> list[ShardUnit]:
        return self._order

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Make every `p.grad` this rank's piece of the mean, and release what is unsharded."""
        super().finish_gradient_synchronization()
        self._end_step()

    def _end_step(self) -> None:
        self._in_step = False
        for unit in self.units():
            unit.reshard()

    def accumulated_gradient(self, parameter: Tensor) -> Tensor:
        """Unsharded, as it is before the reduction; zeros where there is none yet."""
        unit, index = self._places[parameter]
        return unit.unreduced.get_or_zeros(index)

    def held(self) -> dict[str, Held]:
        """A tied parameter under its first name in the whole model."""
        first: dict[str, str] = getattr(self.module, "first_names", {})
        return {first.get(name, name): held for name, held in super().held().items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the module's; also drops a step that was begun and not finished."""
        self._round_is_open = self._forward_ran = False
        if self._in_step:
            self._end_step()
        for unit in self.units():
            unit.forget_gradients()
        super().zero_grad(set_to_none)
