"""Backward in two passes: the gradients of activations now, those of weights later.

A linear layer's backward has two products. That of its input is what the stage before is waiting for; that of its
weight is needed at the end of the step only, and a zero-bubble schedule puts it where a rank would stand idle. While a
`WeightPass` is active, linear layers compute the first in backward and leave the second, with what it needs (the
layer's input and its output's gradient), to `run`. Other weights (norms, embeddings), which cost little, get their
gradient in backward as always; so do layers whose activations are computed again (torch.utils.checkpoint), as the
recomputation knows nothing of passes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from lockstep.parallel.autocast import as_autocast, no_autocast

Product = Callable[[], tuple[Tensor, Tensor]]
"""(a weight, its gradient)."""


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
            return _Linear.apply(given, cast.detach(), added, leaving_to(self, cast))

    def run(self) -> None:
        """The products that backward has left, in its order. Gradients arrive as backward's do, hooks and all."""
        left, self.left = self.left, []
        for product in left:
            weight, gradient = product()
            torch.autograd.backward([weight], [gradient])


def linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def is_recomputed() -> bool:
    """Whether what forward keeps for backward goes through hooks, as those of activation checkpointing. The one private
    name that this needs.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def leaving_to(later: WeightPass, weight: Tensor) -> Callable[[Tensor, Tensor], None]:
    """Leave a product of (rows of gradients, rows of inputs) to be the gradient of `weight`."""

    def leave(gradient: Tensor, x: Tensor) -> None:
        later.left.append(lambda: (weight, gradient.t() @ x))

    return leave


class _Linear(torch.autograd.Function):
    """The weight comes detached: to autograd, what has no gradient yet would count as one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, leave: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.leave = leave
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        ctx.leave(rows, x.reshape(-1, x.shape[-1]))
        return gradient @ weight, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None
