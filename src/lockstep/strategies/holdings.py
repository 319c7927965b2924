"""What a rank holds of the model and of the optimizer's state, under names that no layout changes.

    model.NAME               a parameter or buffer
    optimizer.NAME.KEY       the optimizer's KEY (exp_avg, step, ...) for the parameter NAME
    own.RANK                 what only this rank has and another number of ranks could not use

A value is a whole tensor where every rank has all of it, a DTensor, or a `TensorPiece`: all of them say which part of
the whole they are, so that what one strategy has saved any other can load.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.checkpointable import TensorPiece

Leaf = Any
"""Tensor, DTensor or TensorPiece."""


@dataclass
class Holding:
    """This rank's part of one parameter: `tensor`, which is also the key of its state in the optimizer."""

    name: str
    tensor: Tensor
    shape: torch.Size
    start: int | None = None
    """Of a piece: its first element. None: not a piece."""

    def leaf(self, tensor: Tensor) -> Leaf:
        """`tensor` belongs to this parameter: the parameter itself, or something that the optimizer has of it."""
        if self.start is None or tensor.dim() != 1 or tensor.numel() != self.tensor.numel():
            return tensor.detach()
        return TensorPiece(tensor.detach(), self.shape, self.start)


def whole_holdings(model: nn.Module) -> list[Holding]:
    return [Holding(name, parameter, parameter.shape) for name, parameter in model.named_parameters()]


def model_leaves(model: nn.Module, holdings: Iterable[Holding], only_trained: bool) -> dict[str, Leaf]:
    """A tied parameter under its first name. `only_trained`: what is frozen can be had elsewhere (LoRA)."""
    state = {f"model.{h.name}": h.leaf(h.tensor) for h in holdings if h.tensor.requires_grad or not only_trained}
    names = [n for n in model.state_dict() if f"model.{n}" not in state]
    buffers = dict(model.named_buffers())
    return {**state, **{f"model.{n}": buffers[n].detach() for n in names if n in buffers}}


def optimizer_leaves(optimizer: torch.optim.Optimizer, holdings: Iterable[Holding]) -> dict[str, Leaf]:
    state = {}
    for holding in holdings:
        for key, value in optimizer.state.get(holding.tensor, {}).items():
            if isinstance(value, Tensor):
                state[f"optimizer.{holding.name}.{key}"] = holding.leaf(value)
    return state


@torch.no_grad()
def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make the state that it has not made yet, which it does in a step, without moving a weight.

    With a rate of 0 and gradients of 0 a step changes nothing but the state, which is then overwritten.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    before = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None if optimizer.state.get(parameter) else torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient


def forget_unsaved(optimizer: torch.optim.Optimizer, holdings: Iterable[Holding], saved: set[str]) -> None:
    """A parameter that the saved run had no state for (it had no gradient yet) begins without one here too."""
    for holding in holdings:
        state = optimizer.state.get(holding.tensor)
        if state and not any(f"optimizer.{holding.name}.{key}" in saved for key in state):
            del optimizer.state[holding.tensor]


def wanted_leaves(mine: dict[str, Leaf], saved: set[str]) -> dict[str, Leaf]:
    """What to read of a checkpoint that holds `saved`; refused if that is another model's or another optimizer's."""
    for kind, hint in (("model", "build the same model"), ("optimizer", "use the same train.optimizer")):
        ours = {key for key in mine if key.startswith(f"{kind}.")}
        theirs = {key for key in saved if key.startswith(f"{kind}.")}
        missing = sorted(ours - theirs) if kind == "model" or not ours & theirs else []
        if missing and (kind == "model" or theirs):
            raise UserError(f"the checkpoint has no {missing[0]} (and {len(missing) - 1} more are missing); {hint}")
    return {key: leaf for key, leaf in mine.items() if key in saved}


def copy_leaf(mine: Leaf, theirs: Leaf) -> None:
    """Nothing to do where a checkpoint has been read into our own tensor."""
    mine, theirs = local(mine), local(theirs)
    if mine.data_ptr() != theirs.data_ptr():
        mine.copy_(theirs)


def local(leaf: Leaf) -> Tensor:
    """What this rank holds of it, as a plain tensor."""
    if isinstance(leaf, TensorPiece):
        return leaf.elements
    tensor: Tensor = leaf.to_local() if hasattr(leaf, "to_local") else leaf  # DTensor takes long to import
    return tensor
