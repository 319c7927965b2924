"""Activation checkpointing: keep only a block's inputs in forward, and compute the rest again in backward.

It trades one more forward pass of what is wrapped for the memory of its activations. The modules stay what they are,
names and all: only their `forward` is called through torch.utils.checkpoint, which also repeats their random numbers
(dropout). Strategies that hook into blocks (zero3, fsdp) do so around it.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UserError
from lockstep.models.blocks import blocks_of

Recompute = Literal["none", "full", "every", "attention"]


def recompute(model: nn.Module, mode: Recompute, every: int = 2) -> nn.Module:
    """`full`: every block; `every`: each `every`-th block; `attention`: attention only, where memory grows fastest."""
    for module in _chosen(model, mode, every):
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return model


def _chosen(model: nn.Module, mode: Recompute, every: int) -> list[nn.Module]:
    blocks = [block for _, block in blocks_of(model)]
    match mode:
        case "none":
            return []
        case "full":
            return _some(blocks, mode, "has no blocks")
        case "every":
            return _some(blocks[::every], mode, "has no blocks")
        case "attention":
            attention = [m for m in model.modules() if "Attention" in type(m).__name__]
            return _some(attention, mode, "has no attention; use full or every")


def _some(modules: list[nn.Module], mode: str, otherwise: str) -> list[nn.Module]:
    if not modules:
        raise UserError(f"train.recompute is {mode}, but the model {otherwise}")
    return modules


def when_backward_is_over(callback: Callable[[], None]) -> None:
    """Call it only inside a backward pass. It needs one private name of torch, which DDP and FSDP use too."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_is_running() -> bool:
    """On this thread: a forward pass now is one that is recomputed."""
    try:
        when_backward_is_over(lambda: None)
    except RuntimeError:  # callbacks are queued during a backward pass only
        return False
    return True
