"""Memory in which ZeRO 3 reduces unsharded gradients: two buffers of each dtype, which all units use in turn.

While the gradients of one unit are in flight, the next unit's are copied into the other buffer. One is large enough for
any unit, the other for any unit of a block.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.collectives import new_buffer
from lockstep.layout.group import Group
from lockstep.parallel.zero.shard_unit import ShardUnit


@dataclass(eq=False)
class GradientBuffer:
    """Memory in which unsharded gradients are reduced."""

    memory: Tensor
    user: ShardUnit | None = None
    """Whose gradients were copied into it last."""


class GradientBuffers:
    """The buffers of one model; made for the units that train, and again when another one is unfrozen."""

    def __init__(self, device: torch.device, group: Group) -> None:
        self.device, self.group = device, group
        self._buffers: dict[torch.dtype, list[GradientBuffer]] = {}
        self._units: dict[ShardUnit, None] = {}
        """Units whose gradients fit, in the same order on all ranks, which make buffers together."""

    def make_for(self, units: Collection[ShardUnit], in_blocks: Collection[ShardUnit]) -> None:
        """Make buffers for the gradients of `units`, unless they fit already. Waits for reductions in flight first."""
        if self._units.keys() >= set(units):
            return
        self._units |= dict.fromkeys(units)
        for unit in self._units:
            unit.finish_reduce()
        lengths: dict[torch.dtype, list[int]] = {}
        for unit in self._units:
            largest = lengths.setdefault(unit.reduce_dtype, [0, 0])
            largest[0] = max(largest[0], unit.layout.length)
            largest[1] = max(largest[1], unit.layout.length if unit in in_blocks else 0)
        self._buffers = {
            dtype: [GradientBuffer(new_buffer(length, dtype, self.device, self.group)) for length in both if length]
            for dtype, both in lengths.items()
        }

    def take(self, unit: ShardUnit) -> Tensor:
        """The least recently used one that is large enough, once its last user's gradients have been reduced."""
        buffers = self._buffers[unit.reduce_dtype]
        buffer = next(b for b in buffers if len(b.memory) >= unit.layout.length)
        if buffer.user is not None:
            buffer.user.finish_reduce()
        buffer.user = unit
        buffers.remove(buffer)
        buffers.append(buffer)
        return buffer.memory

    def tensors(self) -> list[Tensor]:
        return [buffer.memory for both in self._buffers.values() for buffer in both]
