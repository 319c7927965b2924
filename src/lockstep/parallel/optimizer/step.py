"""What the steps of optimizers have in common: the closure that some loops give, and the parameters of all groups."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What a step returns: the closure's loss, taken with gradients, or None."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
