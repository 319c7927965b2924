"""Unsharded gradients of a unit, until they are reduced.

Usually they are in `p.grad` of the unsharded parameters. Where several passes add to them, as in a pipeline, they are
moved after each pass into one flat buffer, in the dtype of the reduction: long sums would lose too much in bf16, and
the reduction needs no other memory.
"""

import torch
from torch import Tensor, nn

from lockstep.parallel.zero.flat import FlatLayout, dense


class UnreducedGradients:
    """Keyed by the index of the parameter in its unit."""

    def __init__(self, parameters: list[nn.Parameter], layout: FlatLayout, reduce_dtype: torch.dtype) -> None:
        """`parameters`: the unsharded ones, which compute."""
        self.parameters, self.layout, self.reduce_dtype = parameters, layout, reduce_dtype
        self._buffer: Tensor | None = None
        self._moved: dict[int, Tensor] = {}
        """Of earlier passes: views of the buffer."""

    def get(self, index: int) -> Tensor | None:
        return self._moved.get(index, self.parameters[index].grad)

    def get_or_zeros(self, index: int) -> Tensor:
        """The gradient where it is moved to, or zeros there."""
        if self.parameters[index].grad is not None:
            self.move(index)
        return self._moved.setdefault(index, self._view(index))

    def buffer(self) -> Tensor:
        """Made by the first pass; zero where nothing was moved to. `drop` releases it."""
        if self._buffer is None:
            device = self.parameters[0].device
            self._buffer = torch.zeros(self.layout.length, dtype=self.reduce_dtype, device=device)
        return self._buffer

    @torch.no_grad()
    def move(self, index: int) -> None:
        """Add what a pass has left in `p.grad` to the gradients of earlier ones."""
        gradient, self.parameters[index].grad = self.parameters[index].grad, None
        assert gradient is not None
        if index in self._moved:
            self._moved[index].add_(gradient)
        else:
            self._moved[index] = self._view(index).copy_(dense(gradient))

    def _view(self, index: int) -> Tensor:
        return self.layout.view(self.buffer(), index)

    def drop(self) -> None:
        """All of them."""
        self._moved.clear()
        self._buffer = None
        for parameter in self.parameters:
            parameter.grad = None
