"""What the steps of optimizers have in common: a closure, the parameters of all groups, updates element by element."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models.kernels import usable_on


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What a step returns: the closure's loss, taken with gradients, or None."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def by_element(update: Callable[..., Any], tensors: list[Tensor], *rest: Any) -> Any:
    """Call an update that looks at each element by itself: on a GPU compiled, as one pass over memory."""
    if not usable_on(tensors[0]):
        return update(*tensors, *rest)
    shape = tensors[0].shape
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = [tensor.view(-1) for tensor in tensors]  # of one shape for the compiler
    found = _compiled(update)(*tensors, *rest)
    return found if found is None else found.view(shape)


@cache
def _compiled(update: Callable[..., Any]) -> Callable[..., Any]:
    """For tensors of any size."""
    compiled: Callable[..., Any] = torch.compile(update, dynamic=True)
    return compiled
