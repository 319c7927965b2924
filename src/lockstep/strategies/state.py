"""What survives a run, under names that no layout changes.

    model.NAME               a parameter or buffer
    optimizer.NAME.KEY       the optimizer's KEY (exp_avg, step, ...) for the parameter NAME
    own.RANK                 what only this rank has and another number of ranks could not use

A value is a whole tensor where every rank has all of it, or a `Held`: local memory, and its region of the whole. So
any engine can load what another has saved.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather, all_gather_objects
from lockstep.errors import UserError
from lockstep.layout import Box, Group, Held, Region
from lockstep.layout.region import local
from lockstep.parallel.counting import count_once
from lockstep.parallel.data.wrapper import broadcast_buffers
from lockstep.parallel.optimizer.average import AVERAGE, average_of, only_beginning
from lockstep.parallel.optimizer.step import parameters_of

Leaf = Any
"""Held, Tensor, or, under own., a nest of plain values and tensors."""


class EngineState(Protocol):
    """What checkpoints, verify and the loop ask of an engine's state. Every rank must call each of them together."""

    def before_saving(self) -> None:
        """Make what all ranks hold equal on all of them, as only one rank writes it."""

    def state_dict(self) -> dict[str, Leaf]:
        """This rank's part of everything that the next step depends on. The engine's own tensors, not copies."""

    def to_load(self, saved: set[str]) -> dict[str, Leaf]:
        """What to fill from a checkpoint that holds these names, whatever engine saved it; then `load`."""

    def load(self, state: dict[str, Leaf]) -> None:
        """Take over `state`: one that `to_load` gave and that has been filled, or a copy of `state_dict`."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """Layout-free: original names, whole tensors, on every rank."""


class Holder(Protocol):
    """What has the state: an engine, or the user's own training loop (`checkpoint/user_loop.py`)."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def layout(self) -> Any: ...
    @property
    def options(self) -> Any: ...
    @property
    def local_optimizer(self) -> torch.optim.Optimizer: ...
    def held(self) -> dict[str, Held]: ...
    def trained(self) -> dict[str, Held]: ...
    def local_state(self) -> dict[str, Any]: ...
    def load_local_state(self, state: dict[str, Any]) -> None: ...
    def after_load(self) -> None: ...


class RegionState:
    """The state of engines whose parameters are regions of the model's."""

    def __init__(self, engine: Holder) -> None:
        self.engine, self.rank = engine, engine.layout.world.rank
        self._answers: dict[str, dict[str, tuple[Box, ...]]] = {}

    def before_saving(self) -> None:
        broadcast_buffers(self.engine.model, self.engine.layout.batch)

    def state_dict(self) -> dict[str, Leaf]:
        engine, only_trained = self.engine, self.engine.options.save_trained_only
        held, trained = self._answering("held", engine.held()), self._answering("trained", engine.trained())
        return {
            **model_leaves(engine.model, held, only_trained),
            **optimizer_leaves(engine.local_optimizer, trained),
            f"own.{self.rank}": engine.local_state(),
        }

    def _answering(self, what: str, mine: dict[str, Held]) -> dict[str, Held]:
        """Where regions of several ranks overlap, the first rank saves the overlap. All ranks compute that once."""
        if what not in self._answers:
            device = next((held.tensor.device for held in mine.values()), self.engine.layout.world.device)
            counted = count_once({n: held.region for n, held in mine.items()}, self.engine.layout.norm, device)
            self._answers[what] = {name: counted.boxes[name] for name in counted.overlapping}
        return {name: replace(held, answers_for=self._answers[what].get(name)) for name, held in mine.items()}

    def to_load(self, saved: set[str]) -> dict[str, Leaf]:
        initialize_state(self.engine.local_optimizer)
        refused, wanted = "", dict[str, Leaf]()
        try:
            wanted = wanted_leaves(self.state_dict(), saved)
        except UserError as error:
            refused = str(error)
        for said in all_gather_objects(refused, self.engine.layout.norm):  # ranks hold different parameters
            if said:
                raise UserError(said)
        return wanted

    def load(self, state: dict[str, Leaf]) -> None:
        optimizer = self.engine.local_optimizer
        if any(name.startswith("optimizer.") for name in state):
            initialize_state(optimizer)
        mine = self.state_dict()
        with torch.no_grad():
            for name, value in state.items():
                if not name.startswith("own."):
                    copy_leaf(mine[name], value)
        self.engine.after_load()
        forget_unsaved(optimizer, self.engine.trained(), set(state))
        if own := state.get(f"own.{self.rank}"):
            self.engine.load_local_state(own)

    def full_state_dict(self) -> dict[str, Tensor]:
        engine = self.engine
        saved = persistent(engine.model)
        buffers = {n: Held(b, Region.whole(b.shape)) for n, b in engine.model.named_buffers() if n in saved}
        found = gathered({**engine.held(), **buffers}, engine.layout.norm)
        # Tied parameters under their other names too; a stage of a pipeline knows all names of the model.
        first: dict[str, str] = getattr(engine.model, "first_names", None) or first_names(engine.model)
        return {**found, **{name: found[first[name]] for name in first}}


def gathered(held: dict[str, Held], group: Group) -> dict[str, Tensor]:
    """Whole tensors, put together from all ranks' regions. For looking at: training never needs them."""
    everyone = all_gather_objects({name: (h.region, h.tensor.dtype) for name, h in held.items()}, group)
    regions = [{name: region for name, (region, _) in theirs.items()} for theirs in everyone]
    dtypes = {name: dtype for theirs in everyone for name, (_, dtype) in theirs.items()}
    device = next((h.tensor.device for h in held.values()), torch.device("cpu"))
    names = list(dict.fromkeys(name for theirs in regions for name in theirs))
    found: dict[str, Tensor] = {}
    for name in names:
        mine = held.get(name)
        if all(name in theirs and theirs[name].is_whole for theirs in regions):
            assert mine is not None
            found[name] = mine.tensor.clone().view(mine.region.shape)
        else:
            like = torch.empty(0, dtype=dtypes[name], device=device)
            found[name] = _gathered(mine, [theirs.get(name) for theirs in regions], like, group)
    return found


def _gathered(mine: Held | None, regions: list[Region | None], like: Tensor, group: Group) -> Tensor:
    longest = max(region.numel for region in regions if region is not None)
    shape = next(region.shape for region in regions if region is not None)
    mine_row = like.new_zeros(longest)
    if mine is not None:
        mine_row[: mine.region.numel] = mine.tensor.reshape(-1)
    rows = all_gather(mine_row, group, purpose="check")
    whole = like.new_zeros(shape)
    for region, row in zip(regions, rows, strict=True):
        if region is not None:
            region.write(whole, row[: region.numel])
    return whole


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the first name of the same parameter (tied ones have several)."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    return {name: first[p] for name, p in model.named_parameters(remove_duplicate=False)}


def persistent(model: nn.Module) -> set[str]:
    """Names of what belongs into a state_dict."""
    return set(model.state_dict(keep_vars=True))


# ---- leaves --------------------------------------------------------------------------------------------------


def leaf(held: Held) -> Leaf:
    """As a checkpoint stores it: what every rank holds in full is a plain tensor."""
    return held.tensor.view(held.region.shape) if held.region.is_whole else held


def model_leaves(model: nn.Module, held: dict[str, Held], only_trained: bool) -> dict[str, Leaf]:
    """A tied parameter under its first name. `only_trained`: what is frozen can be had elsewhere (LoRA)."""
    state = {f"model.{n}": leaf(h) for n, h in held.items() if h.parameter.requires_grad or not only_trained}
    saved = persistent(model)
    return {**state, **{f"model.{n}": b.detach() for n, b in model.named_buffers() if n in saved}}


def optimizer_leaves(optimizer: torch.optim.Optimizer, trained: dict[str, Held]) -> dict[str, Leaf]:
    state, average = {}, average_of(optimizer)
    for name, held in trained.items():
        own = dict(optimizer.state.get(held.parameter, {}))
        if average is not None and held.parameter in average.tensors:
            own[AVERAGE] = average.tensors[held.parameter]  # type: ignore[index]
        for key, value in own.items():
            if isinstance(value, Tensor):
                found = held.like(value)
                state[f"optimizer.{name}.{key}"] = leaf(found) if isinstance(found, Held) else found
    return state


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer create its missing state, which it does in its first step, without changing a weight.

    With a rate of 0 and gradients of 0 a step changes nothing but the state, which is then overwritten.
    """
    parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
    before = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None if optimizer.state.get(parameter) else torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    with only_beginning(optimizer):
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient


def forget_unsaved(optimizer: torch.optim.Optimizer, trained: dict[str, Held], saved: set[str]) -> None:
    """A parameter that the saved run had no state for (it had no gradient yet) begins without one here too. So does
    an average of the weights that the saved run did not keep: it begins with the weights of the next step.
    """
    average = average_of(optimizer)
    for name, held in trained.items():
        if average is not None and f"optimizer.{name}.{AVERAGE}" not in saved:
            average.tensors.pop(held.parameter, None)  # type: ignore[call-overload]
        state = optimizer.state.get(held.parameter)
        if state and not any(f"optimizer.{name}.{key}" in saved for key in state):
            del optimizer.state[held.parameter]


def wanted_leaves(mine: dict[str, Leaf], saved: set[str]) -> dict[str, Leaf]:
    """What to read of a checkpoint that holds `saved`; refused if that is another model's or another optimizer's."""
    for kind, hint in (("model", "build the same model"), ("optimizer", "use the same train.optimizer")):
        ours, theirs = (
            {key for key in names if key.startswith(f"{kind}.") and not key.endswith(f".{AVERAGE}")}
            for names in (mine, saved)
        )
        missing = sorted(ours - theirs) if kind == "model" or not ours & theirs else []
        if missing and (kind == "model" or theirs):
            raise UserError(f"the checkpoint has no {missing[0]} (and {len(missing) - 1} more are missing); {hint}")
    saved_keys = optimizer_keys(saved)
    for name, keys in optimizer_keys(mine).items():
        known = saved_keys.get(name, set()) - {AVERAGE}
        if known and keys - known - {AVERAGE, "step"}:  # some fused optimizers count their steps elsewhere
            raise UserError(
                f"the checkpoint has other state for {name} ({', '.join(sorted(known))}) than this "
                f"optimizer ({', '.join(sorted(keys))}); use the same train.optimizer"
            )
    return {key: leaf for key, leaf in mine.items() if key in saved}


def optimizer_keys(names: Iterable[str]) -> dict[str, set[str]]:
    """Of each parameter, the keys of its state."""
    found: dict[str, set[str]] = {}
    for name in names:
        if name.startswith("optimizer."):
            parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
            found.setdefault(parameter, set()).add(key)
    return found


def copy_leaf(mine: Leaf, theirs: Leaf) -> None:
    """Copy, unless the checkpoint has been read into our tensor directly."""
    mine, theirs = _memory(mine), _memory(theirs)
    if mine.data_ptr() != theirs.data_ptr():
        mine.copy_(theirs)


def _memory(leaf: Leaf) -> Tensor:
    return leaf.tensor if isinstance(leaf, Held) else local(leaf)
