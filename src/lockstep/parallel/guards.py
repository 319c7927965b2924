"""What torch's own functions would do in silence with parameters of which a rank has only a part: here it is an error.

`torch.nn.utils.clip_grad_norm_` takes the norm of what stands in `p.grad`: nothing under ZeRO-1 and 2, a piece under
ZeRO-3, a part under tensor and pipeline parallelism. An optimizer that looks at a whole matrix (Muon) takes a piece for
one. The wrappers mark the parameters they spread; the marks are looked for where torch is given the parameters.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.errors import UserError

WHOLE_TENSOR_OPTIMIZERS = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
"""They look at more than one element at a time."""


def mark_spread(parameters: Iterable[nn.Parameter], by: str | nn.Module, pieces: bool = False) -> None:
    """Say that this rank's gradients of these are not the whole model's: for as long as there is the wrapper `by`, or,
    by a name, for good. `pieces`: nor are the tensors matrices.
    """
    for parameter in parameters:
        parameter.spread_by = by if isinstance(by, str) else weakref.ref(by)  # type: ignore[attr-defined]
        parameter.is_piece = pieces  # type: ignore[attr-defined]
    _guard_torch()


def spread_by(parameters: Any) -> str | None:
    """What has spread one of them over the ranks."""
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        by = getattr(parameter, "spread_by", None)
        if isinstance(by, str):
            return by
        if by is not None and (wrapper := by()) is not None:
            return type(wrapper).__name__
    return None


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, for parameters that a rank has whole."""

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
    """Once. `clip_grad_norm_` looks up `_clip_grads_with_norm_` when it is called, so the guard is met however and
    whenever it was imported; `clip_grad_value_` has nothing of the kind, and is replaced where torch offers it.
    """
    if hasattr(clip_grad._clip_grads_with_norm_, "guards_spread"):
        return
    clip_grad._clip_grads_with_norm_ = _refusing("clip_grad_norm_", clip_grad._clip_grads_with_norm_)
    torch.nn.utils.clip_grads_with_norm_ = _refusing("clip_grads_with_norm_", torch.nn.utils.clip_grads_with_norm_)
    value = _refusing("clip_grad_value_", clip_grad.clip_grad_value_)
    clip_grad.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = value
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Of every optimizer in the process, before its step."""
    if type(optimizer).__name__ not in WHOLE_TENSOR_OPTIMIZERS:
        return
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if getattr(parameter, "is_piece", False):
            raise UserError(
                f"{type(optimizer).__name__} looks at more than one element at a time, and {spread_by(parameter)} has "
                f"cut through the tensors; use an element-wise optimizer (SGD, Adam, AdamW, RMSprop, ...)"
            )
