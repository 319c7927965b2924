"""A model cut into parts that follow each other, and the parts of one rank: a stage.

What can be cut: an `nn.Sequential`, and any module that lists its layers, `pipeline_layers()`, in the order in
which activations pass: (names of the submodules that a layer uses, a function of the activations). The module is cut in
place: submodules of other ranks' parts are replaced by empty ones, and the rest keep their names.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.layout.group import Group
from lockstep.models.replace import replace_module
from lockstep.parallel.pipeline.balance import even_cuts
from lockstep.parallel.pipeline.schedule import Placement

SYNCHRONIZE = -1
"""Given instead of a chunk: forward returns a zero that depends on every parameter."""
Layer = tuple[tuple[str, ...], Callable[..., Any]]


def layers_of(module: nn.Module) -> list[Layer]:
    """What activations pass through, one after the other."""
    say: Any = getattr(module, "pipeline_layers", None)
    if say is not None:
        layers: list[Layer] = say()
        return layers
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return [((name,), OneArgument(part)) for name, part in module._modules.items() if part is not None]
    raise UserError(
        f"{type(module).__name__} does not say what it is made of; give an nn.Sequential, or a module with "
        f"pipeline_layers(), a list of (names of submodules, function)"
    )


def costs_of(module: nn.Module, layers: Sequence[Layer]) -> list[int]:
    """Each layer's compute cost: how many weights it multiplies with. An embedding is only looked up."""
    found = []
    for names, _ in layers:
        parts = [part for name in names for part in module.get_submodule(name).modules()]
        weights = [p for part in parts for p in part.parameters(recurse=False) if not isinstance(part, nn.Embedding)]
        found.append(1 + sum(p.numel() for p in weights if p.dim() > 1))
    return found


class OneArgument:
    """As in an nn.Sequential: a module gets what the previous one returned, a tuple as one argument."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *activations: Any) -> Any:
        return self.module(activations[0] if len(activations) == 1 else activations)


class Elsewhere(nn.Module):
    """Stands where another rank's part of the model was."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this part of the model is on another rank")


class Stage(nn.Module):
    """One rank's parts of a model, under the model's own names. `stage(chunk, *activations)` runs one of them."""

    def __init__(self, module: nn.Module, layers: list[list[Layer]], first_names: dict[str, str]) -> None:
        super().__init__()
        # The module's own dicts: a submodule replaced here is replaced there too, where the layers' functions use it.
        for own in ("_modules", "_parameters", "_buffers"):
            self.__dict__[own] = module.__dict__[own]
        self.__dict__["whole"] = module  # not a submodule: its parameters are here already
        self.layers = layers
        self.shared: dict[str, list[int]] = {}
        """First names of parameters that other ranks' parts have too, and the ranks that have them."""
        self.first_names = first_names
        """Every name of every parameter of the whole model -> the first name of the same parameter."""

    def forward(self, chunk: int, *activations: Tensor) -> Any:
        if chunk == SYNCHRONIZE:
            return torch.stack([0.0 * p.sum() for p in self.parameters() if p.requires_grad]).sum()
        passed: Any = activations
        for _, run in self.layers[chunk]:
            passed = run(*passed) if isinstance(passed, tuple | list) else run(passed)
        return passed

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """A tied parameter under its first name, also where the module of that name is on another rank.

        Parameters that other ranks have too come first: their gradients are complete last, and buckets fill from the
        end.
        """
        seen, found = set(), []
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            known = self.first_names.get(name, name) if parameter not in seen else name
            seen.add(parameter)
            found.append((known, parameter))
        yield from sorted(found, key=lambda named: named[0].removeprefix(f"{prefix}.") not in self.shared)

    def train(self, mode: bool = True) -> "Stage":
        whole: Any = self.whole
        whole.training = mode
        return super().train(mode)


def cut_stage(module: nn.Module, placement: Placement, group: Group, cuts: Sequence[int] | None = None) -> Stage:
    """This rank's stage."""
    layers = layers_of(module)
    layers = [(tuple(n for n in names if is_there(module, n)), run) for names, run in layers]
    if cuts is None:
        cuts = even_cuts(costs_of(module, layers), placement.parts)
    check_cuts(cuts, placement.parts, len(layers))
    bounds = [0, *cuts, len(layers)]
    parts = [layers[a:b] for a, b in pairwise(bounds)]
    first = {p: name for name, p in module.named_parameters()}
    first_names = {name: first[p] for name, p in module.named_parameters(remove_duplicate=False)}
    holders: dict[str, set[int]] = {}
    for part, its_layers in enumerate(parts):
        for p in parameters_of(module, its_layers):
            holders.setdefault(first[p], set()).add(placement.place(part)[0])
    unused = set(first.values()) - set(holders)
    if unused:
        lost = sorted(unused)[0]
        raise UserError(f"{lost} belongs to no layer of the pipeline; name its module in pipeline_layers()")
    mine = [parts[placement.part(group.rank, chunk)] for chunk in range(placement.chunks)]
    kept = {name for its_layers in mine for names, _ in its_layers for name in names}
    for names, _ in layers:
        for name in names:
            if name not in kept:
                replace_module(module, name, Elsewhere())
    shared = {name: sorted(ranks) for name, ranks in sorted(holders.items()) if len(ranks) > 1}
    stage = Stage(module, mine, first_names)
    stage.shared = shared
    return stage


def is_there(module: nn.Module, name: str) -> bool:
    """A layer may name a submodule that this model does not have (a position embedding, with rotary ones)."""
    try:
        return isinstance(module.get_submodule(name), nn.Module)
    except AttributeError:
        return False


def parameters_of(module: nn.Module, layers: Sequence[Layer]) -> Iterator[nn.Parameter]:
    for names, _ in layers:
        for name in names:
            yield from module.get_submodule(name).parameters()


def check_cuts(cuts: Sequence[int], parts: int, layers: int) -> None:
    rising = all(a < b for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    if len(cuts) != parts - 1 or not rising:
        raise UserError(
            f"cuts is {list(cuts)}, but {parts} parts of {layers} layers need {parts - 1} rising numbers from 1 to "
            f"{layers - 1}: where each part after the first begins"
        )
