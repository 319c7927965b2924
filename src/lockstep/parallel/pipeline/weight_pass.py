"""Backward in two passes: the gradients of activations now, those of weights later.

A linear layer's backward has two products, also where tensor parallelism has cut it. That of its input is what the
stage before is waiting for. That of its weight is needed at the end of the step only, and a zero-bubble schedule puts
it where a rank would stand idle. While a `WeightPass` is active, linear layers compute the first in backward and leave
the second, with what it needs (the layer's input and its output's gradient), to `run`. Other weights (norms,
embeddings), which cost little, get their gradient in backward as always; so do layers whose activations are computed
again (torch.utils.checkpoint), as the recomputation knows nothing of passes.
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
    """What forward has multiplied with: the parameter, or the parameter as autocast has cast it."""
    compute: Callable[[], Tensor]
    prepare: Callable[[], object] = lambda: None
    """Called while the product before it is computed: issues what `compute` waits for."""


Defer = Callable[..., None]
"""(compute, prepare) -> None: leave a weight's gradient to the weight pass."""


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
        """The products that backward has left, in its order. Gradients arrive as backward's do, hooks and all."""
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
    """The weight pass that a linear layer leaves the gradient of its weight to, if there is one."""
    trained = torch.is_grad_enabled() and weight.requires_grad and x.requires_grad
    return _ACTIVE[-1] if _ACTIVE and trained and weight.is_leaf and not is_recomputed() else None


def deferring(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Defer | None]:
    """As autocast wants them, and the weight pass that computes the weight's gradient. The weight is then detached: to
    autograd, what has no gradient yet would count as one.
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
    """Whether what forward keeps for backward goes through hooks, as those of activation checkpointing. The one private
    name that this needs.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _Linear(torch.autograd.Function):
    """The weight comes detached: to autograd, what has no gradient yet would count as one."""

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
