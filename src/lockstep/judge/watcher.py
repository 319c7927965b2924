"""Inside the script: records what happens before, in and after each step of an optimizer.

    a module is called, and not by another      weights as they are before the step; digests of what it is given
    backward is called on a number              the loss
    clip_grad_norm_ has returned                the norm
    an optimizer's step begins                  its settings, and every gradient
    it ends                                     weights and buffers

The script runs as it is. What differs from what it would do alone is asked for: the reference's weights at the start
(`start`), weights moved by their last bit (`moved`), rows in another order (`reordered`), no dropout (`no_dropout`).
"""

import functools
import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from lockstep.judge import deepspeed, samples
from lockstep.judge.holding import gradient_pieces, pieces, plain_piece
from lockstep.judge.ledger import Ledger
from lockstep.judge.piece import Piece, buffers, modules_of, outermost
from lockstep.judge.store import Recorder, Store, Stored, processes


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


DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
"""Functions of torch.nn.functional."""


def begin(folder: Path) -> None:
    """When torch has been imported, in each process."""
    settings = Settings(**json.loads((folder / "settings.json").read_text(encoding="utf-8")))
    Watcher(folder, settings).install()


def watch(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Name the model and its optimizer, where `lockstep judge` cannot find them by itself: before the first step.

    Without `lockstep judge` it does nothing.
    """
    if _watcher is not None:
        _watcher.add(model)
        if optimizer is not None:
            _watcher.watched = [*(_watcher.watched or []), optimizer]


_watcher: "Watcher | None" = None


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


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """What goes wrong in the watcher is recorded, and the script goes on unwatched."""

    @functools.wraps(method)
    def called(self: "Watcher", *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            self.done = True
            with suppress(OSError):  # a full disk: the judge sees it itself
                self.recorder.note("cannot", why=f"{type(error).__name__}: {error}", where=traceback.format_exc())
            return None

    return called


class Watcher:
    """Of one process."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self.models: list[Model] = []
        self.ledger = Ledger()
        self.optimizers: list[Any] = []
        self.counts: list[int] = []
        self.losses: list[Tensor] = []
        self.norms: list[tuple[float, Any]] = []
        self.watched: list[Optimizer] | None = None
        """Those that the script has named; None: all."""
        self.stepping: Any = None
        self.event: dict[str, Any] | None = None
        self.done = False
        self.in_backward = 0
        self.coarsest: str | None = None
        """Of the types that autocast has computed in."""
        self._depth = threading.local()
        self._last: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        """Optimizer -> the handle of our hook in it."""
        self._tops: dict[int, tuple[nn.Module, Model]] = {}
        self._recorder: tuple[int, Recorder] | None = None

    def install(self) -> None:
        global _watcher
        _watcher = self
        call = nn.Module.__call__

        @functools.wraps(call)
        def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(module, *args, **kwargs)
            return self.called(call, module, args, kwargs)

        nn.Module.__call__ = watched_call  # type: ignore[method-assign]
        register_optimizer_step_pre_hook(self.before_hooks)
        register_optimizer_step_post_hook(self.step_ends)
        torch.autograd.backward = self.backward(torch.autograd.backward)
        clip = self.clipping(nn.utils.clip_grad_norm_)
        nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = clip
        utils: Any = nn.utils
        if hasattr(utils, "clip_grads_with_norm_"):
            by_norm = self.clipping_by(utils.clip_grads_with_norm_)
            utils.clip_grads_with_norm_ = utils.clip_grad.clip_grads_with_norm_ = by_norm
        torch.autocast.__enter__ = self.autocasting(torch.autocast.__enter__)  # type: ignore[method-assign]
        if self.settings.no_dropout:
            for name in DROPOUTS:
                setattr(F, name, without(getattr(F, name), "p", 1))
            F.scaled_dot_product_attention = without(F.scaled_dot_product_attention, "dropout_p", 4)

    @property
    def recorder(self) -> Recorder:
        """Of this process: a fork gets its own."""
        if self._recorder is None or self._recorder[0] != os.getpid():
            self._recorder = os.getpid(), Recorder(self.folder)
            rank, size = place()
            self._recorder[1].note("rank", rank=rank, size=size, argv=sys.argv, torch=torch.__version__)
        return self._recorder[1]

    # ---- forward ---------------------------------------------------------------------------------------------

    def called(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        depth = getattr(self._depth, "value", 0)
        if depth or self.done or self.in_backward or not torch.is_grad_enabled():
            return call(module, *args, **kwargs)
        model = self.model_of(module)
        if model is None:
            return call(module, *args, **kwargs)
        self._depth.value = 1
        try:
            self.before(model)
            rows = self.read_inputs(model, module, (args, kwargs))
            if not self.settings.reordered or not rows:
                return call(module, *args, **kwargs)
            order = Reordered(rows)
            args, kwargs = tree_map(order.mixed, (args, kwargs))
            return tree_map(order.back, call(module, *args, **kwargs))
        finally:
            self._depth.value = 0

    @guarded
    def read_inputs(self, model: Model, module: nn.Module, arguments: Any) -> int:
        """How many rows."""
        given = samples.tensors_in(arguments)
        if model.entry is None or module.training > model.trains:  # what was not in training was an evaluation
            model.entry, model.trains, model.inputs = module, module.training, []
        if module is model.entry and module.training == model.trains:
            model.inputs.append([samples.noted(tensor) for tensor in given])
        return given[0].shape[0] if given else 0

    @guarded
    def model_of(self, module: nn.Module) -> Model | None:
        """None: nothing in it trains."""
        known = self._tops.get(id(module))
        if known is not None and known[0] is module:
            return known[1]
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return None
        top = outermost(module)
        model = next((one for one in self.models if one.module is top), None) or self.add(top)
        self._tops[id(module)] = module, model
        return model

    def add(self, top: nn.Module) -> Model:
        """What was seen of its parts before it was wrapped is forgotten."""
        inside = {id(one) for _, one in modules_of(top)}
        self.models = [one for one in self.models if id(one.module) not in inside]
        taken = {one.prefix + piece.name for one in self.models for piece in pieces(one.module)}
        kind, number, model = type(unwrapped(top)).__name__, 1, Model(top)
        names = [piece.name for piece in pieces(top)]
        while any(model.prefix + name in taken for name in names):
            model.prefix = f"{kind}{number if number > 1 else ''}."
            number += 1
        self.models.append(model)
        if (zero := deepspeed.zero_of(top)) is not None:
            deepspeed.check(top)
            zero.step = self.step_of_zero(zero, zero.step)
        return model

    @guarded
    def before(self, model: Model) -> None:
        """Its weights, before the first forward of a step."""
        if model.before is not None:
            return
        held = pieces(model.module)
        first, model.started = not model.started, True
        if first and self.settings.start is not None:
            self.fill(model, held)
        store = self.recorder.store
        model.before = {
            "weights": {model.prefix + piece.name: store.put(piece.weight()) for piece in held},
            "buffers": {model.prefix + name: store.put(buffer) for name, buffer in buffers(model.module)},
        }
        if first:
            self.recorder.note("start", **model.before, **self.described(model, held))

    def described(self, model: Model, held: list[Piece]) -> dict[str, Any]:
        module = model.module
        return {
            "pieces": {model.prefix + piece.name: piece.noted() for piece in held},
            "batch_norms": [
                name.rstrip(".")
                for name, one in modules_of(module)
                if isinstance(one, nn.modules.batchnorm._BatchNorm) and one.training
            ],
            "synchronized": any(isinstance(one, nn.SyncBatchNorm) for one in module.modules()),
            "dropout": any(drops(one, self.settings.no_dropout) for one in module.modules()),
        }

    def fill(self, model: Model, held: list[Piece]) -> None:
        """With the reference's weights."""
        store = Store(self.folder.parent / "tensors")
        start: dict[str, Any] = {"weights": {}, "buffers": {}}
        for process in processes(self.folder.parent / str(self.settings.start)):
            for event in process.of("start"):
                start["weights"] |= event["weights"]
                start["buffers"] |= event["buffers"]
        with torch.no_grad():
            for piece in held:
                if (found := Stored.of(by_name(start["weights"], model.prefix + piece.name))) is not None:
                    whole = store.get(found)
                    piece.fill(moved_by_last_bit(whole) if self.settings.moved else whole)
            for name, buffer in buffers(model.module):
                if (found := Stored.of(by_name(start["buffers"], model.prefix + name))) is not None:
                    buffer.copy_(store.get(found))

    # ---- backward --------------------------------------------------------------------------------------------

    def backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.done:
                given = tensors if isinstance(tensors, Tensor) else (list(tensors) or [None])[0]
                if isinstance(given, Tensor) and given.numel() == 1:
                    self.losses.append(given.detach().clone())
            self.in_backward += 1
            try:
                return run(tensors, *args, **kwargs)
            finally:
                self.in_backward -= 1

        return watched

    def clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def watched(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            norm = clip(parameters, max_norm, *args, **kwargs)
            self.norms.append((float(max_norm), norm))
            return norm

        return watched

    def clipping_by(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """By a norm that the script has."""

        @functools.wraps(clip)
        def watched(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            self.norms.append((float(max_norm), total_norm))
            return clip(parameters, max_norm, total_norm, *args, **kwargs)

        return watched

    def autocasting(self, enter: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(enter)
        def watched(context: Any) -> Any:
            if not torch.compiler.is_compiling() and context._enabled and torch.is_grad_enabled():
                self.coarsest = str(context.fast_dtype).removeprefix("torch.")
            return enter(context)

        return watched

    # ---- the optimizer ---------------------------------------------------------------------------------------

    def before_hooks(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hooks of the script's own may reduce or clip gradients: ours is put behind them, and comes last."""
        if self.done or torch.compiler.is_compiling():
            return
        if (handle := self._last.pop(optimizer, None)) is not None:
            handle.remove()
        self._last[optimizer] = optimizer.register_step_pre_hook(self.step_begins)

    def step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Before the step of an optimizer, but not of one that another has inside."""
        if self.done:
            return None
        if self.watched is not None and not any(optimizer is one for one in self.watched):
            return None
        if self.stepping is not None and self.stepping is not optimizer:
            if self.event is None and self.stepping is ours_around(optimizer):
                self.gradients(self.stepping)
            return None
        number = self.number(optimizer)
        if self.counts[number] >= self.settings.steps:
            self.over()
            return None
        self.stepping = optimizer
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            if getattr(optimizer, "inner", None) is None or ours_around(optimizer.inner) is not optimizer:
                self.gradients(optimizer)
            return None

        def first_gradients() -> Any:
            self.event, loss = None, closure()
            self.gradients(optimizer)
            return loss

        @functools.wraps(closure)
        def watched() -> Any:
            return first_gradients() if self.event is None else closure()

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    def step_of_zero(self, zero: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        """DeepSpeed's, which is no optimizer of torch's."""

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.step_begins(zero, (), {})
            taken = step(*args, **kwargs)
            norm = getattr(zero, "_global_grad_norm", None)
            if zero.clip_grad > 0 and norm is not None:
                self.norms = [(float(zero.clip_grad), norm)]
            self.step_ends(zero, (), {})
            return taken

        return watched

    @guarded
    def gradients(self, optimizer: Any) -> None:
        """Everything that is known before the optimizer changes a weight."""
        groups = groups_of(optimizer)
        held: dict[str, Piece] = {}
        mine: dict[str, Piece] = {}
        before: dict[str, Any] = {}
        inputs: list[Any] = []
        for model in self.models_with(set(groups)):
            self.before(model)
            assert model.before is not None
            every = pieces(model.module)
            held |= {model.prefix + piece.name: piece for piece in every}
            mine |= {model.prefix + p.name: p for p in gradient_pieces(model.module, every, set(groups))}
            before |= model.before["weights"]
            inputs += model.inputs
        store = self.recorder.store
        strays = outside(optimizer, {id(piece.parameter) for piece in held.values()})
        before |= {piece.name: store.put(piece.weight()) for piece in strays}
        held |= {piece.name: piece for piece in strays}
        mine |= {piece.name: piece for piece in strays}
        gradients = {name: piece.gradient() for name, piece in mine.items()}
        if not isinstance(optimizer, Optimizer):
            gradients = deepspeed.clipped(gradients, optimizer.clip_grad)
        rank, size = place()
        self.event = {
            "rank": rank,
            "size": size,
            "optimizer": self.number(optimizer),
            "step": 0,
            "pieces": {name: piece.noted() for name, piece in held.items()},
            "gradient_pieces": {name: piece.noted() for name, piece in mine.items()},
            "before": before,
            "inputs": inputs,
            "losses": [float(loss) for loss in self.losses],
            "settings": [settings_of(group) for group in optimizer.param_groups],
            "trained": {name: groups.get(id(held[name].parameter), 0) for name in mine if name in held},
            "computes": self.coarsest,
            "strays": len(strays),
            "gradients": {n: None if g is None else store.put(g) for n, g in gradients.items()},
            "collectives": self.ledger.since(),
        }

    @guarded
    def step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.done or self.stepping is not optimizer:
            return
        self.stepping = None
        event, self.event = self.event, None
        if event is None:
            return
        number = event["optimizer"]
        self.counts[number] += 1
        event["step"] = self.counts[number]
        event["norms"] = [(limit, whole_number(norm)) for limit, norm in self.norms]
        store = self.recorder.store
        weights: dict[str, Any] = {}
        kept: dict[str, Any] = {}
        held: set[int] = set()
        for model in self.models_with(set(groups_of(optimizer))):
            every = pieces(model.module)
            held |= {id(piece.parameter) for piece in every}
            weights |= {model.prefix + piece.name: store.put(piece.weight()) for piece in every}
            kept |= {model.prefix + name: store.put(buffer) for name, buffer in buffers(model.module)}
            model.before, model.inputs, model.entry = None, [], None
        weights |= {piece.name: store.put(piece.weight()) for piece in outside(optimizer, held)}
        self.recorder.note("step", **event, weights=weights, buffers=kept)
        self.losses, self.norms, self.coarsest = [], [], None
        self.ledger.since()

    def over(self) -> None:
        """An optimizer has taken its steps and begins another: all others have had their turn."""
        self.recorder.note("done")
        self.done, self.stepping = True, None
        self.models, self._tops = [], {}

    def models_with(self, parameters: set[int]) -> list[Model]:
        """Those that have one of these parameters."""
        found = [one for one in self.models if any(id(p) in parameters for p in one.module.parameters())]
        if not found:
            for module in [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]:
                own = vars(module).get("_parameters", {}).values()
                model = self.model_of(module) if any(id(p) in parameters for p in own) else None
                if model is not None and model not in found:
                    found.append(model)
        return found

    def number(self, optimizer: Optimizer) -> int:
        """In the order of their first steps."""
        for i, one in enumerate(self.optimizers):
            if one is optimizer:
                return i
        self.optimizers.append(optimizer)
        self.counts.append(0)
        return len(self.optimizers) - 1


def groups_of(optimizer: Any) -> dict[int, int]:
    """Parameter -> its group's number."""
    if not isinstance(optimizer, Optimizer):
        return deepspeed.groups_of(optimizer)
    return {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


def outside(optimizer: Any, held: set[int]) -> list[Piece]:
    """Its parameters that are in no module, by their number."""
    if not isinstance(optimizer, Optimizer):
        return []
    strays = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in held]
    return [plain_piece(f"optimizer.{i}", parameter) for i, parameter in enumerate(strays)]


def ours_around(optimizer: Any) -> Any:
    """The `ShardedOptimizer` that has this one inside, and gives it the gradients only when it steps."""
    known = sys.modules.get("lockstep.parallel.zero.sharded_optimizer")
    if known is None:
        return None
    found = [one for one in gc.get_objects() if isinstance(one, known.ShardedOptimizer)]
    return next((one for one in found if one.inner is optimizer), None)


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


def by_name(known: dict[str, Any], name: str) -> Any:
    """Also where one of the two models is in a module of the script's own, and its names are longer by that."""
    if name in known:
        return known[name]
    ends = [other for other in known if f".{other}".endswith(f".{name}") or f".{name}".endswith(f".{other}")]
    return known[ends[0]] if len(ends) == 1 else None


def place() -> tuple[int, int]:
    """(rank, ranks)"""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own, in whose name the parameters have no prefix."""
    found = [one for prefix, one in modules_of(module) if not prefix]
    return found[-1]


def drops(module: nn.Module, no_dropout: bool) -> bool:
    """It has dropout, by the name that is usually given to it; `no_dropout` reaches all but the recurrent ones."""
    if no_dropout and not isinstance(module, nn.RNNBase):
        return False
    named = {**vars(module), "dropout": getattr(module, "p", 0) if "Dropout" in type(module).__name__ else 0}
    return module.training and any(
        "drop" in name and isinstance(value, float) and 0 < value < 1 for name, value in named.items()
    )


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Of a group of parameters, what a line of JSON can say."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key != "params" and isinstance(value, Tensor) and value.numel() == 1:
            found[key] = float(value)
        elif key != "params" and isinstance(value, int | float | str | bool | tuple | list | None):
            found[key] = value
    return found


def whole_number(norm: Any) -> float:
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


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
