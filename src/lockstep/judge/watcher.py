"""Inside the script: records what happens before, in and after each step of an optimizer.

    a module is called, and not by another      weights as they are before the step; digests of what it is given
    backward is called on a number              the loss
    clip_grad_norm_ has returned                the norm
    an optimizer's step begins                  its settings, and every gradient
    it ends                                     weights and buffers

The script runs as it is; what is changed on request is in `changes.py`.
"""

import functools
import json
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from lockstep.judge import deepspeed, samples
from lockstep.judge.changes import Reordered, Settings, Start, drop_nothing
from lockstep.judge.holding import gradient_pieces, pieces
from lockstep.judge.ledger import Ledger
from lockstep.judge.models import Model, Models
from lockstep.judge.optimizers import gives_gradients_late, groups_of, outside, settings_of, whole_number
from lockstep.judge.piece import Piece, buffers
from lockstep.judge.store import Recorder


def begin(folder: Path) -> None:
    """When torch has been imported, in each process."""
    settings = Settings(**json.loads((folder / "settings.json").read_text(encoding="utf-8")))
    Watcher(folder, settings).install()


def watch(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Name the model and its optimizer, where `lockstep judge` cannot find them by itself: before the first step.

    Without `lockstep judge` it does nothing.
    """
    if _watcher is not None:
        _watcher.model_of(model)
        if optimizer is not None:
            _watcher.watched = [*(_watcher.watched or []), optimizer]


_watcher: "Watcher | None" = None


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
        self.models = Models()
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
        self._zeros: list[Any] = []
        """Optimizers of DeepSpeed's that are watched."""
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
            drop_nothing()

    @property
    def recorder(self) -> Recorder:
        """Of this process: a fork gets its own."""
        if self._recorder is None or self._recorder[0] != os.getpid():
            self._recorder = os.getpid(), Recorder(self.folder)
            rank, size = place()
            self._recorder[1].note("rank", rank=rank, size=size)
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
        model = self.models.of(module)
        if model is not None:
            self.take_zero(model)
        return model

    def take_zero(self, model: Model) -> None:
        """DeepSpeed's optimizer is none of torch's, and has no hooks."""
        zero = deepspeed.zero_of(model.module)
        if zero is not None and not any(zero is one for one in self._zeros):
            deepspeed.check(model.module)
            self._zeros.append(zero)
            zero.step = self.step_of_zero(zero, zero.step)

    @guarded
    def before(self, model: Model) -> None:
        """Its weights, before the first forward of a step."""
        if model.before is not None:
            return
        held = pieces(model.module)
        first, model.started = not model.started, True
        if first and self.settings.start is not None:
            Start(self.folder.parent / self.settings.start, self.settings.moved).fill(model.module, held, model.prefix)
        store = self.recorder.store
        model.before = {
            "weights": {model.prefix + piece.name: store.put(piece.weight()) for piece in held},
            "buffers": {model.prefix + name: store.put(buffer) for name, buffer in buffers(model.module)},
        }
        if first:
            self.recorder.note("start", **model.before, **model.described(held, self.settings.no_dropout))

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
            if self.event is None and gives_gradients_late(self.stepping) and self.stepping.inner is optimizer:
                self.gradients(self.stepping)
            return None
        number = self.number(optimizer)
        if self.counts[number] >= self.settings.steps:
            self.over()
            return None
        self.stepping = optimizer
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            if not gives_gradients_late(optimizer):
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
        for model in self.models.having(set(groups)):
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
        for model in self.models.having(set(groups_of(optimizer))):
            every = pieces(model.module)
            held |= {id(piece.parameter) for piece in every}
            weights |= {model.prefix + piece.name: store.put(piece.weight()) for piece in every}
            kept |= {model.prefix + name: store.put(buffer) for name, buffer in buffers(model.module)}
            model.begin_again()
        weights |= {piece.name: store.put(piece.weight()) for piece in outside(optimizer, held)}
        self.recorder.note("step", **event, weights=weights, buffers=kept)
        self.losses, self.norms, self.coarsest = [], [], None
        self.ledger.since()

    def over(self) -> None:
        """An optimizer has taken its steps and begins another: all others have had their turn."""
        self.recorder.note("done")
        self.done, self.stepping = True, None
        self.models.forget()

    def number(self, optimizer: Optimizer) -> int:
        """In the order of their first steps."""
        for i, one in enumerate(self.optimizers):
            if one is optimizer:
                return i
        self.optimizers.append(optimizer)
        self.counts.append(0)
        return len(self.optimizers) - 1


def place() -> tuple[int, int]:
    """(rank, ranks)"""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
