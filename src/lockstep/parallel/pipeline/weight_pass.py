"""Backward in two passes: the gradients of activations now, those of weights later.

A linear layer's backward has two products, also where tensor parallelism has cut it. The gradient of its input is what
the previous stage waits for. The gradient of its weight is needed only at the end of the step, and a zero-bubble
schedule computes it where a rank would idle. Under an active `WeightPass`, linear layers compute the first in backward
and defer the second, with what it needs (the layer's input and its output's gradient), to `run`. Other weights (norms,
embeddings), which are cheap, get their gradient in backward as usual; so do layers whose activations are recomputed
(torch.utils.checkpoint), because the recomputation does not know about passes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from lockstep.models.autocast import as_autocast, no_autocast


@dataclass(frozen=True)
class Product:
    """A weight's gradient that has not been computed yet."""

    parameter: Tensor
    weight: Tensor
    """What forward has multiplied with: the parameter, or autocast's copy of it."""
    compute: Callable[[], Tensor]
    prepare: Callable[[], object] = lambda: None
    """Called while the previous product is computed: issues the collectives that `compute` waits for."""


Defer = Callable[..., None]
"""(compute, prepare) -> None: defers a weight's gradient to the weight pass."""


class WeightPass(TorchFunctionMode):
    """Active around a forward pass, it defers the weights' gradients of the matching backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Product] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.linear:
            return function(*args, **kwargs)
        x, weight, bias = linear_arguments(*args, **kwargs)
        if deferred_by(x, weight) is None:
            return F.linear(x, weight, bias)
        with_dtype = deferring(x, weight, bias)
        with no_autocast(x.device):
            return _Linear.apply(*with_dtype)

    def defer_for(self, parameter: Tensor, weight: Tensor) -> Defer:
        """What a layer's backward calls instead of computing the gradient of `weight`."""

        def defer(compute: Callable[[], Tensor], prepare: Callable[[], object] = lambda: None) -> None:
            self.left.append(Product(parameter, weight, compute, prepare))

        return defer

    def __enter__(self) -> "WeightPass":
        _ACTIVE.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _ACTIVE.remove(self)

    def run(self) -> None:
        """Compute the deferred products, in backward's order. Gradients accumulate as in backward, with all hooks."""
        of: dict[Tensor, list[Product]] = {}
        for product in self.left:
            of.setdefault(product.parameter, []).append(product)  # a weight that is used twice gets one gradient
        queue, self.left = deque(of.values()), []
        of.clear()
        following = queue.popleft() if queue else []
        for product in following:
            product.prepare()
        while following:
            products, following = following, queue.popleft() if queue else []
            for product in following:
                product.prepare()
            torch.autograd.backward([p.weight for p in products], [p.compute() for p in products])


_ACTIVE: list[WeightPass] = []


def deferred_by(x: Tensor, weight: Tensor) -> WeightPass | None:
    """The weight pass to which a linear layer defers the gradient of its weight, if there is one."""
    trained = torch.is_grad_enabled() and weight.requires_grad and x.requires_grad
    return _ACTIVE[-1] if _ACTIVE and trained and weight.is_leaf and not is_recomputed() else None


def deferring(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Defer | None]:
    """The arguments as autocast casts them, and how to defer the weight's gradient. The weight is then detached: else
    autograd would take the missing gradient for a finished one.
    """
    later = deferred_by(x, weight)
    given, cast, added = as_autocast(x, weight, bias)
    assert given is not None
    assert cast is not None
    if later is None:
        return given, cast, added, None
    return given, cast.detach(), added, later.defer_for(weight, cast)


def linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def is_recomputed() -> bool:
    """Whether forward runs under saved-tensor hooks, as it does under activation checkpointing. It needs one private
    name of torch.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _Linear(torch.autograd.Function):
    """The weight comes detached: else autograd would take the missing gradient for a finished one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, defer: Defer) -> Tensor:
        ctx.defer = defer
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        ctx.defer(lambda: rows.t() @ x.reshape(-1, x.shape[-1]))
        return gradient @ weight, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None
