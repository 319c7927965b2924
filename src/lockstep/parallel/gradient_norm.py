"""The norm of the whole model's gradient, each element once, and clipping by it: in any loop, under any wrapper.

On a rank, `p.grad` is all of the gradient (data parallelism), a piece of it (ZeRO), a slice of it (tensor
parallelism) or that of some layers (a pipeline); the regions describe which. If every rank holds everything, the norm
needs no communication. Else the first rank that holds an element counts it: it sums powers of those, and the sums are
all-reduced.
"""

import weakref
from collections.abc import Mapping
from functools import cached_property
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.collectives import all_reduce
from lockstep.errors import UserError
from lockstep.layout.group import Group, GroupLike, group_of
from lockstep.layout.region import Box, Held, local
from lockstep.parallel.counting import count_once
from lockstep.parallel.holding import Holder, trained_by


class Gradients:
    """Gradients of this rank's trained parameters, part of one model that the ranks of `group` hold together."""

    def __init__(self, trained: Mapping[str, Held], group: Group, device: torch.device) -> None:
        self.trained, self.group, self.device = trained, group, device

    @cached_property
    def _known(self) -> tuple[list[tuple[Held, tuple[Box, ...]]], list[Held], bool]:
        """(what this rank counts, with its boxes; what earlier ranks count, all or in part; whether all ranks hold
        everything). The first access is a collective.
        """
        counted = count_once({name: held.region for name, held in self.trained.items()}, self.group, self.device)
        mine = [(self.trained[name], boxes) for name, boxes in counted.boxes.items() if boxes]
        copies = [held for name, held in self.trained.items() if counted.boxes[name] != held.region.boxes]
        return mine, copies, counted.everywhere

    def tensors(self) -> list[Tensor]:
        """This rank's, as plain tensors."""
        found = (gradient_of(held.parameter) for held in self.trained.values())
        return [gradient for gradient in found if gradient is not None and gradient.numel()]

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradient; not finite also if only a copy that is not counted is not finite."""
        counted, copies, everywhere = self._known
        if everywhere:
            return nn.utils.get_total_norm(self.tensors(), norm_type).to(self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if parts := [part for held, boxes in counted for part in gradient_parts(held, boxes)]:
            total += nn.utils.get_total_norm(parts, norm_type).to(total)
        if others := [g for held in copies if (g := gradient_of(held.parameter)) is not None]:
            total += 0 * nn.utils.get_total_norm(others, norm_type).to(total)  # 0 x inf is NaN
        if norm_type == inf:
            return all_reduce(total, dist.ReduceOp.MAX, self.group, purpose="norm")
        return all_reduce(total**norm_type, group=self.group, purpose="norm") ** (1.0 / norm_type)

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """As torch's clip_grad_norm_, for a norm that is known."""
        self.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))

    def clip_elements(self, limit: float) -> None:
        """As torch's clip_grad_value_."""
        if gradients := self.tensors():
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)

    def scale(self, factor: Tensor) -> None:
        if gradients := self.tensors():
            torch._foreach_mul_(gradients, factor.to(gradients[0]))


def gradient_parts(held: Held, boxes: tuple[Box, ...]) -> list[Tensor]:
    """These boxes of a parameter's gradient, if it has one."""
    gradient = gradient_of(held.parameter)
    if gradient is None:
        return []
    if boxes == held.region.boxes:
        return [gradient]
    return [held.region.view(gradient, box) for box in boxes]


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient's values: of a DTensor the local shard, of a sparse gradient the coalesced values."""
    if parameter.grad is None:
        return None
    if parameter.grad.is_sparse:
        parameter.grad = parameter.grad.coalesce()
        return parameter.grad._values()
    return local(parameter.grad)


# ---- in the user's own loop ----------------------------------------------------------------------------------------

_known: weakref.WeakKeyDictionary[Any, tuple[list[Any], Gradients]] = weakref.WeakKeyDictionary()
"""Cached per model that was clipped: which rank holds what does not change."""


@torch.no_grad()
def clip_grad_norm_(
    model: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    process_group: GroupLike = None,
) -> Tensor:
    """Scale the gradients so that the whole model's gradient norm is at most `max_norm`, however it is sharded.

        model(inputs).sum().backward()
        norm = lockstep.clip_grad_norm_(model, 1.0)
        optimizer.step()

    `model`: plain, cut by `tensor_parallel`, a `Pipeline`, or in a wrapper: ours, PyTorch's DDP or FSDP2. Every rank
    must call it. Returns the norm before clipping, the same on every rank (under `LocalSGD`, whose ranks train apart
    between two averages, each rank's own). `process_group`: the ranks that train this model, if not all of them.
    """
    if not isinstance(model, nn.Module | Holder):
        raise UserError(
            f"lockstep.clip_grad_norm_ was given {_described(model)}; give the model itself, or the wrapper around it: "
            f"which rank holds which part of it is what parameters alone do not say"
        )
    if not float(max_norm) > 0 or not float(norm_type) > 0:
        raise UserError(
            f"max_norm is {max_norm} and norm_type {norm_type}; both must be more than 0 (norm_type: or inf)"
        )
    gradients = _gradients_of(model, process_group)
    norm = gradients.norm(float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the norm of the gradient is {float(norm)}, so it cannot be clipped")
    gradients.clip(norm, float(max_norm))
    return norm.double()


def _gradients_of(model: Any, process_group: GroupLike) -> Gradients:
    trained = trained_by(model)
    same = [process_group, *(id(held.parameter) for held in trained.values())]
    known = _known.get(model)
    if known is None or known[0] != same:
        device = next((held.tensor.device for held in trained.values()), torch.device("cpu"))
        known = _known[model] = (same, Gradients(trained, group_of(process_group), device))
    return known[1]


def _described(given: Any) -> str:
    kind = type(given).__name__
    return f"a {kind}" if not isinstance(given, list | tuple) else f"a {kind} of {len(given)}"
