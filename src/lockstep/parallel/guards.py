"""Errors where torch's functions would silently do the wrong thing with parameters that a rank holds only in part.

`torch.nn.utils.clip_grad_norm_` takes the norm of `p.grad`, which is None under ZeRO-1 and 2, a piece under
ZeRO-3, and a part under tensor and pipeline parallelism. An optimizer that needs whole matrices (Muon) would take a
piece for one. The wrappers mark the parameters that they spread, and these guards of torch's functions check the marks.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.errors import UserError
from lockstep.layout.group import ALONE, replicas_of
from lockstep.parallel.optimizer.step import parameters_of

WHOLE_TENSOR_OPTIMIZERS = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
"""Their update of an element depends on other elements."""
EXPERT_PARALLEL = "expert_parallel"
"""Has spread experts: a rank holds some, in full."""


def needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Ours puts together what ranks hold of a tensor."""
    return type(optimizer).__name__ in WHOLE_TENSOR_OPTIMIZERS and not getattr(optimizer, "takes_pieces", False)


def mark_spread(parameters: Iterable[nn.Parameter], by: str | nn.Module, pieces: bool = False) -> None:
    """Mark parameters whose gradients on this rank are not the whole model's: as long as the wrapper `by` exists, or
    forever, if `by` is a name. `pieces`: the parameters are flat pieces, not matrices.
    """
    for parameter in parameters:
        parameter.spread_by = by if isinstance(by, str) else weakref.ref(by)  # type: ignore[attr-defined]
        parameter.is_piece = pieces  # type: ignore[attr-defined]
    _guard_torch()


def spread_by(parameters: Any) -> str | None:
    """The name of what has spread one of them over the ranks; None: nothing has."""
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        by = getattr(parameter, "spread_by", None)
        if isinstance(by, str):
            return by
        if by is not None and (wrapper := by()) is not None:
            return type(wrapper).__name__
    return None


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which then refuses parameters that are spread over the ranks."""

    @wraps(function)
    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(parameters, Tensor):
            parameters = list(parameters)  # a generator can be read once
        if (by := spread_by(parameters)) is not None:
            mend = (
                "lockstep.clip_grad_norm_(model, max_norm), which every rank calls, is right"
                if "norm" in name
                else "clip by the norm instead: lockstep.clip_grad_norm_(model, max_norm)"
            )
            raise UserError(
                f"torch.nn.utils.{name} sees only what this rank holds of the gradients, and {by} has spread them over "
                f"the ranks; {mend}"
            )
        return function(parameters, *args, **kwargs)

    guarded.guards_spread = True  # type: ignore[attr-defined]
    return guarded


def _guard_torch() -> None:
    """Once. `clip_grad_norm_` looks up `_clip_grads_with_norm_` when it is called, so the guard works however and
    whenever it was imported; `clip_grad_value_` calls no such helper, and is replaced in torch's modules.
    """
    if hasattr(clip_grad._clip_grads_with_norm_, "guards_spread"):
        return
    clip_grad._clip_grads_with_norm_ = _refusing("clip_grad_norm_", clip_grad._clip_grads_with_norm_)
    torch.nn.utils.clip_grads_with_norm_ = _refusing("clip_grads_with_norm_", torch.nn.utils.clip_grads_with_norm_)
    value = _refusing("clip_grad_value_", clip_grad.clip_grad_value_)
    clip_grad.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = value
    register_optimizer_step_pre_hook(_check_optimizer)
    DistributedDataParallel.__init__ = _leaving_experts(DistributedDataParallel.__init__)  # type: ignore[method-assign]


def _leaving_experts(init: Callable[..., None]) -> Callable[..., None]:
    """DDP's, to which experts of different ranks look like copies of the same: it would broadcast and average them."""

    @wraps(init)
    def guarded(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        experts = {
            n for n, p in module.named_parameters() if getattr(p, "spread_by", None) == EXPERT_PARALLEL
        } - ignored
        if any(replicas_of(p, ALONE).size > 1 for n, p in module.named_parameters() if n in experts):
            raise UserError(
                "DDP cannot reduce experts over their replicas; wrap the model in lockstep.DataParallel, which does"
            )
        if experts:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored | experts)
        init(self, module, *args, **kwargs)

    return guarded


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Runs before the step of every optimizer in the process."""
    if not needs_whole_tensors(optimizer):
        return
    for parameter in parameters_of(optimizer):
        if getattr(parameter, "is_piece", False):
            raise UserError(
                f"{type(optimizer).__name__} looks at more than one element at a time, and {spread_by(parameter)} has "
                f"cut through the tensors; use an element-wise optimizer (SGD, Adam, AdamW, RMSprop, ...)"
            )
