"""Backward in two passes: the gradients of activations now, those of weights later.

A linear layer's backward has two products. That of its input is what the stage before is waiting for; that of its
weight is needed at the end of the step only, and a zero-bubble schedule puts it where a rank would stand idle. While a
`WeightPass` is active, linear layers compute the first in backward and leave the second, with what it needs (the
layer's input and its output's gradient), to `run`. Other weights (norms, embeddings), which cost little, get their
gradient in backward as always; so do layers whose activations are computed again (torch.utils.checkpoint), as the
recomputation knows nothing of passes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from lockstep.parallel.autocast import as_autocast, no_autocast


@dataclass(frozen=True)
class Product:
    """A weight's gradient that has not been computed yet."""

    parameter: Tensor
    weight: Tensor
    """What forward has multiplied with: the parameter, or the parameter as autocast has cast it."""
    compute: Callable[[], Tensor]


class WeightPass(TorchFunctionMode):
    """Active around forward, it defers the weights' part of that forward's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Product] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.linear:
            return function(*args, **kwargs)
        x, weight, bias = linear_arguments(*args, **kwargs)
        trained = torch.is_grad_enabled() and weight.requires_grad and x.requires_grad
        if not trained or not weight.is_leaf or is_recomputed():
            return F.linear(x, weight, bias)
        given, cast, added = as_autocast(x, weight, bias)
        assert cast is not None
        with no_autocast(x.device):
            return _Linear.apply(given, cast.detach(), added, self.deferring(weight, cast))

    def deferring(self, parameter: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor], None]:
        """Defers a product of (rows of gradients, rows of inputs), which is the gradient of `weight`."""

        def defer(gradient: Tensor, x: Tensor) -> None:
            self.left.append(Product(parameter, weight, lambda: gradient.t() @ x))

        return defer

    def run(self) -> None:
        """The products that backward has left, in its order. Gradients arrive as backward's do, hooks and all."""
        left, self.left = self.left, []
        for product in left:
            torch.autograd.backward([product.weight], [product.compute()])


def linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def is_recomputed() -> bool:
    """Whether what forward keeps for backward goes through hooks, as those of activation checkpointing. The one private
    name that this needs.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _Linear(torch.autograd.Function):
    """The weight comes detached: to autograd, what has no gradient yet would count as one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, defer: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.defer = defer
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        ctx.defer(rows, x.reshape(-1, x.shape[-1]))
        return gradient @ weight, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None
