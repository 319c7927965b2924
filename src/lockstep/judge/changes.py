"""What a watched script does otherwise than alone, on request: begin with other weights, read its rows in another
order, drop nothing.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.judge.piece import Piece, buffers
from lockstep.judge.store import Store, Stored, processes


@dataclass
class Settings:
    """What is asked of a run: `settings.json` in its folder."""

    steps: int = 6
    start: str | None = None
    """The folder of the run whose weights this one starts from."""
    moved: bool = False
    """The weights' last bits are moved: what comes out differs as much as rounding makes it."""
    reordered: bool = False
    """So are the rows of each batch, which go through the model in another order."""
    no_dropout: bool = False
    share_gpu: bool = False
    """All ranks use the first GPU."""


class Start:
    """The weights and buffers that another run began with."""

    def __init__(self, folder: Path, moved: bool) -> None:
        self.store, self.moved = Store(folder.parent / "tensors"), moved
        self.weights: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}
        for process in processes(folder):
            for event in process.of("start"):
                self.weights |= event["weights"]
                self.buffers |= event["buffers"]

    @torch.no_grad()
    def fill(self, model: nn.Module, held: list[Piece], prefix: str) -> None:
        for piece in held:
            if (found := Stored.of(by_name(self.weights, prefix + piece.name))) is not None:
                whole = self.store.get(found)
                piece.fill(moved_by_last_bit(whole) if self.moved else whole)
        for name, buffer in buffers(model):
            if (found := Stored.of(by_name(self.buffers, prefix + name))) is not None:
                buffer.copy_(self.store.get(found))


def by_name(known: dict[str, Any], name: str) -> Any:
    """Also where one of the two models is in a module of the script's own, and its names are longer by that."""
    if name in known:
        return known[name]
    ends = [other for other in known if f".{other}".endswith(f".{name}") or f".{name}".endswith(f".{other}")]
    return known[ends[0]] if len(ends) == 1 else None


class Reordered:
    """The rows of a batch in another order, and what comes out in the old one."""

    def __init__(self, rows: int) -> None:
        self.order = torch.randperm(rows, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
        self.inverse = torch.argsort(self.order)

    def mixed(self, value: Any) -> Any:
        return self._ordered(value, self.order)

    def back(self, value: Any) -> Any:
        return self._ordered(value, self.inverse)

    def _ordered(self, value: Any, order: Tensor) -> Any:
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == len(order):
            return value[order.to(value.device)]
        return value


def moved_by_last_bit(weight: Tensor) -> Tensor:
    """Up or down, at random."""
    if not weight.is_floating_point():
        return weight
    signs = torch.randint(2, weight.shape, generator=torch.Generator("cpu").manual_seed(2), device="cpu") * 2 - 1
    return weight + weight * signs.to(weight) * (torch.finfo(weight.dtype).eps / 2)


DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
"""Functions of torch.nn.functional."""


def drop_nothing() -> None:
    for name in DROPOUTS:
        setattr(F, name, without(getattr(F, name), "p", 1))
    F.scaled_dot_product_attention = without(F.scaled_dot_product_attention, "dropout_p", 4)


def drops(module: nn.Module, no_dropout: bool) -> bool:
    """It has dropout, by the name that is usually given to it; `no_dropout` reaches all but the recurrent ones."""
    if no_dropout and not isinstance(module, nn.RNNBase):
        return False
    named = {**vars(module), "dropout": getattr(module, "p", 0) if "Dropout" in type(module).__name__ else 0}
    return module.training and any(
        "drop" in name and isinstance(value, float) and 0 < value < 1 for name, value in named.items()
    )


def without(function: Callable[..., Any], name: str, position: int) -> Callable[..., Any]:
    """The function, its argument of this name always 0."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], 0.0, *args[position + 1 :])
        else:
            kwargs[name] = 0.0
        return function(*args, **kwargs)

    return called
