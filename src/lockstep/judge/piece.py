"""A rank's elements of a parameter, and the modules of a model without their wrappers.

Names are those of the model itself: what DDP, FSDP, `torch.compile`, Fabric and others put before them is taken off.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.layout.region import Box, Region, is_dtensor, local

WRAPPERS = ("torch.", "deepspeed.", "accelerate.", "lightning.", "lightning_fabric.", "lockstep.")
"""Packages whose modules may have the user's model inside, under one of these names."""
INSIDE = {
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_original_module",
}


@dataclass
class Piece:
    """This rank's elements of a parameter."""

    name: str
    parameter: Tensor
    boxes: tuple[Box, ...] | None
    """None: all of it."""
    shape: tuple[int, ...] | None
    """Of the whole parameter; None: as in the reference."""
    elements: slice | None = None
    """Of a parameter that has several in one row of memory, this one's."""
    trains: bool = True

    @property
    def count(self) -> int:
        """Of its elements on this rank."""
        if self.boxes is not None:
            return sum(box.numel for box in self.boxes)
        return self.parameter.numel() if self.shape is None else prod(self.shape)

    def weight(self) -> Tensor:
        return self._mine(self.parameter)

    def gradient(self) -> Tensor | None:
        gradient: Any = self.parameter.grad
        if gradient is None:
            return None
        if is_dtensor(gradient) and gradient.placements != self.placements:
            gradient = gradient.redistribute(placements=self.placements)
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        return self._mine(gradient)

    @property
    def placements(self) -> Any:
        """Of a DTensor."""
        parameter: Any = self.parameter
        return parameter.placements

    def _mine(self, tensor: Tensor) -> Tensor:
        mine = local(tensor)
        return mine if self.elements is None else mine.reshape(-1)[self.elements]

    def fill(self, whole: Tensor) -> None:
        """With its part of the whole parameter."""
        mine = self.weight()
        part = whole if self.boxes is None else Region(tuple(whole.shape), self.boxes).read(whole)
        mine.copy_(part.view(mine.shape))

    def noted(self) -> dict[str, Any]:
        boxes = None if self.boxes is None else [[box.offsets, box.sizes] for box in self.boxes]
        return {"boxes": boxes, "shape": self.shape}


def buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that are not told to be left out of a state dict."""
    seen = set()
    for prefix, module in modules_of(model):
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen and key not in module._non_persistent_buffers_set:
                seen.add(id(buffer))
                yield prefix + key, local(buffer)


def modules_of(model: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """(what its names begin with, module), without wrappers."""
    seen = set() if seen is None else seen
    if id(model) in seen:
        return
    seen.add(id(model))
    yield prefix, model
    wraps = type(model).__module__.startswith(WRAPPERS)
    for key, child in model._modules.items():
        if child is not None:
            inside = key in INSIDE and (wraps or key != "module")  # no model uses the other names for its own
            yield from modules_of(child, prefix if inside else f"{prefix}{key}.", seen)


def outermost(module: nn.Module) -> nn.Module:
    """The module that has this one inside and is in no other: the whole model, with its wrappers."""
    everywhere = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_modules" in vars(one)]
    parents: dict[int, list[nn.Module]] = {}
    for one in everywhere:
        for child in one._modules.values():
            parents.setdefault(id(child), []).append(one)
    top, seen = module, {id(module)}
    while above := [one for one in parents.get(id(top), []) if id(one) not in seen]:
        top = max(above, key=lambda one: sum(1 for _ in one.parameters()))
        seen.add(id(top))
    return top
