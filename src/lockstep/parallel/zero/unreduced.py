"""Unsharded gradients of a unit, until they are reduced.

Usually they are in `p.grad` of the unsharded parameters. Where those are bf16 and gradients are reduced in fp32,
and several passes add to them, they are moved to fp32 after each pass: long sums would lose too much in bf16.
"""

import torch
from torch import Tensor, nn


class UnreducedGradients:
    """Keyed by the index of the parameter in its unit."""

    def __init__(self, parameters: list[nn.Parameter], reduce_dtype: torch.dtype) -> None:
        """`parameters`: the unsharded ones, which compute."""
        self.parameters, self.reduce_dtype = parameters, reduce_dtype
        self._wide: dict[int, Tensor] = {}
        """Of earlier passes, in `reduce_dtype`."""

    def get(self, index: int) -> Tensor | None:
        return self._wide.get(index, self.parameters[index].grad)

    def get_or_zeros(self, index: int) -> Tensor:
        """The gradient, or zeros, in the dtype in which it accumulates over the passes of a step."""
        parameter = self.parameters[index]
        if self.get(index) is None:
            zeros = torch.zeros_like(parameter, dtype=self.reduce_dtype)
            if self.reduce_dtype != parameter.dtype:
                self._wide[index] = zeros
            else:
                parameter.grad = zeros
        gradient = self.get(index)
        assert gradient is not None
        return gradient

    @torch.no_grad()
    def widen(self, index: int) -> None:
        """Add what a pass has left in `p.grad` to the gradients of earlier ones."""
        gradient, self.parameters[index].grad = self.parameters[index].grad, None
        assert gradient is not None
        if index in self._wide:
            self._wide[index].add_(gradient)
        else:
            self._wide[index] = gradient.to(self.reduce_dtype)

    def drop(self) -> None:
        """All of them."""
        self._wide.clear()
        for parameter in self.parameters:
            parameter.grad = None
