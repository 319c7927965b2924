"""The models of a script: the outermost modules around what it calls, each with names of its own."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lockstep.judge.changes import drops
from lockstep.judge.holding import pieces
from lockstep.judge.piece import Piece, modules_of, outermost


@dataclass
class Model:
    """The outermost module around what the script calls."""

    module: nn.Module
    prefix: str = ""
    """Of its names, where another model has the same."""
    started: bool = False
    before: dict[str, Any] | None = None
    """Its weights before the step that is under way."""
    inputs: list[list[dict[str, Any]]] = field(default_factory=list)
    """Of each micro-batch of it."""
    entry: nn.Module | None = None
    """What is called with them: the first module of the step that is, in training if any is."""
    trains: bool = False
    """Whether that was in training."""

    def begin_again(self) -> None:
        """After a step."""
        self.before, self.inputs, self.entry = None, [], None

    def described(self, held: list[Piece], no_dropout: bool) -> dict[str, Any]:
        return {
            "pieces": {self.prefix + piece.name: piece.noted() for piece in held},
            "batch_norms": [
                name.rstrip(".")
                for name, one in modules_of(self.module)
                if isinstance(one, nn.modules.batchnorm._BatchNorm) and one.training
            ],
            "synchronized": any(isinstance(one, nn.SyncBatchNorm) for one in self.module.modules()),
            "dropout": any(drops(one, no_dropout) for one in self.module.modules()),
        }


class Models:
    """All of one process."""

    def __init__(self) -> None:
        self._all: list[Model] = []
        self._tops: dict[int, tuple[nn.Module, Model]] = {}

    def of(self, module: nn.Module) -> Model | None:
        """The one that it is in; None: nothing in it trains."""
        known = self._tops.get(id(module))
        if known is not None and known[0] is module:
            return known[1]
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return None
        top = outermost(module)
        model = next((one for one in self._all if one.module is top), None) or self.add(top)
        self._tops[id(module)] = module, model
        return model

    def add(self, top: nn.Module) -> Model:
        """What was seen of its parts before it was wrapped is forgotten."""
        inside = {id(one) for _, one in modules_of(top)}
        self._all = [one for one in self._all if id(one.module) not in inside]
        taken = {one.prefix + piece.name for one in self._all for piece in pieces(one.module)}
        kind, number, model = type(unwrapped(top)).__name__, 1, Model(top)
        names = [piece.name for piece in pieces(top)]
        while any(model.prefix + name in taken for name in names):
            model.prefix = f"{kind}{number if number > 1 else ''}."
            number += 1
        self._all.append(model)
        return model

    def having(self, parameters: set[int]) -> list[Model]:
        """Those that have one of these parameters; where none was called, it is looked for."""
        found = [one for one in self._all if any(id(p) in parameters for p in one.module.parameters())]
        return found or list(self._never_called(parameters))

    def _never_called(self, parameters: set[int]) -> Iterator[Model]:
        seen = set()
        for module in [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]:
            own = vars(module).get("_parameters", {}).values()
            model = self.of(module) if any(id(p) in parameters for p in own) else None
            if model is not None and id(model) not in seen:
                seen.add(id(model))
                yield model

    def forget(self) -> None:
        self._all, self._tops = [], {}


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own, in whose name the parameters have no prefix."""
    found = [one for prefix, one in modules_of(module) if not prefix]
    return found[-1]
