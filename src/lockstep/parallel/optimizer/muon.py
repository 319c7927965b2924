"""Muon: momentum whose matrices are orthogonalized, so that a step moves all directions of a layer alike.

A step, for each matrix W of the blocks, with gradient G:

1. momentum         B <- m B + (1 - m) G, and U = m B + (1 - m) G (Nesterov): element by element, on what a rank holds
2. orthogonalize    O = U with all singular values near one: of whole matrices (`matrices.py`)
3. update           W <- W - lr (decay W + 0.2 sqrt(max(rows, columns)) O): element by element again

The factor gives the update the size that AdamW's usually has, so that both take one learning rate. What is no matrix of
a block (embeddings, head, norms, biases, routers) is stepped by AdamW, in the same optimizer.

Where ranks hold regions of matrices (ZeRO, FSDP2, tensor and expert parallelism), `assign` says which; momentum is
kept for these regions only.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.layout.group import GroupLike, group_of
from lockstep.layout.region import Held, local, region_of
from lockstep.models.matrices import Kind, matrices_in
from lockstep.parallel.guards import spread_by
from lockstep.parallel.holding import trained_by, unwrapped
from lockstep.parallel.law import Sent
from lockstep.parallel.optimizer.law import exchanged
from lockstep.parallel.optimizer.matrices import WholeMatrices, rows_and_columns
from lockstep.parallel.optimizer.orthogonal import compute_dtype, orthogonalized
from lockstep.parallel.optimizer.step import by_element, loss_of, parameters_of

SIZE_OF_ADAMW = 0.2
"""Root mean square of AdamW's usual update."""


def without_hooks(step: Any) -> Any:
    """torch replaces a class's `step` by one that runs hooks, when the first optimizer of the class is made."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


class Muon(torch.optim.AdamW):
    """Muon for the matrices of a model's blocks, AdamW for the rest.

        optimizer = lockstep.Muon(model.parameters(), lr=1e-3).assign(model)

    `assign` finds the matrices, and where this rank holds parts of them; without it, every tensor of two dimensions and
    more counts as a matrix.
    """

    takes_pieces = True
    """It may be given pieces of tensors, if it is assigned a model."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        fused: bool | None = None,
    ) -> None:
        """`momentum`: Muon's. `betas`, `eps`: AdamW's."""
        if not 0 <= momentum < 1:
            raise UserError(f"momentum is {momentum}, but it must be at least 0 and less than 1")
        self._matrices: dict[nn.Parameter, str] | None = None
        """Parameters that are matrices, or regions of some -> their names."""
        self._whole: WholeMatrices | None = None
        super().__init__(params, lr, betas, eps, weight_decay, fused=fused)
        self._step_supports_amp_scaling = False  # a gradient scaler unscales before: momentum must not have its scale
        self.defaults["momentum"] = momentum
        for group in self.param_groups:
            group.setdefault("momentum", momentum)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As loaded, copied or unpickled. AdamW's own would look for its steps where only matrices' momentum is."""
        torch.optim.Optimizer.__setstate__(self, state)
        self.__dict__.setdefault("_matrices", None)
        self.__dict__.setdefault("_whole", None)
        self._step_supports_amp_scaling = False
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As every optimizer's, before the first step and `assign`: these find the matrices."""
        if self._whole is not None:
            raise UserError("Muon knows its matrices by now; give it all parameters before, or make another optimizer")
        super().add_param_group(param_group)
        if "momentum" in self.defaults:
            self.param_groups[-1].setdefault("momentum", self.defaults["momentum"])

    def assign(self, model: nn.Module, process_group: GroupLike = None) -> "Muon":
        """The model, or what it is wrapped in; every rank of the group calls it."""
        held = trained_by(model)
        kinds = matrices_in(unwrapped(model), {name: h.region.shape for name, h in held.items()})
        self.assign_held(held, kinds, process_group)
        return self

    def assign_held(self, held: dict[str, Held], kinds: dict[str, Kind], process_group: GroupLike = None) -> None:
        """`held`: what this rank has of each parameter that this optimizer steps; `kinds`: which are matrices."""
        mine = set(parameters_of(self))
        found = {name: h for name, h in held.items() if name in kinds and h.parameter in mine}
        self._matrices = {h.parameter: name for name, h in found.items()}  # type: ignore[misc]
        stacks = {name for name, kind in kinds.items() if kind == "stack"}
        self._whole = WholeMatrices(found, stacks, group_of(process_group))

    @property
    def whole_matrices(self) -> WholeMatrices:
        if self._whole is None:
            self._assign_by_shape()
        assert self._whole is not None
        return self._whole

    def _assign_by_shape(self) -> None:
        parameters = list(parameters_of(self))
        if (by := spread_by(parameters)) is not None or not all(region_of(p).is_whole for p in parameters):
            raise UserError(
                f"Muon needs whole matrices, and {by or 'a mesh'} has spread the parameters over the ranks; call "
                f"optimizer.assign(model) with the wrapped model once, before the first step"
            )
        found = {str(i): p for i, p in enumerate(parameters) if p.dim() >= 2}
        held = {name: Held(p, region_of(p)) for name, p in found.items()}
        self.assign_held(held, dict.fromkeys(found, "matrix"))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Every rank of the group calls it."""
        loss = loss_of(closure)
        whole = self.whole_matrices
        with self._without_matrices() as gradients:
            without_hooks(torch.optim.AdamW.step)(self)  # this optimizer's hooks run around this step, once
        skipped: Tensor | None = getattr(self, "found_inf", None)  # as a fused AdamW takes it: 1.0, on the device
        updates: dict[str, Tensor] = {}
        for group, parameter in self._of_groups():
            if parameter in gradients:
                updates[self._name(parameter)] = self._momentum(parameter, gradients[parameter], group, skipped)
        if not whole.regions and not whole.cut:
            return loss
        like = self._like(updates)
        directions = whole.compute(updates, orthogonalized, like)
        for group, parameter in self._of_groups():
            if parameter in gradients:
                self._update(parameter, directions[self._name(parameter)], group, skipped)
        return loss

    def _name(self, parameter: nn.Parameter) -> str:
        assert self._matrices is not None
        return self._matrices[parameter]

    def _of_groups(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        assert self._matrices is not None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._matrices:
                    yield group, parameter

    @contextmanager
    def _without_matrices(self) -> Iterator[dict[nn.Parameter, Tensor]]:
        """AdamW steps what has a gradient: the matrices' are put aside."""
        aside = {p: p.grad for _, p in self._of_groups() if p.grad is not None}
        for parameter in aside:
            parameter.grad = None
        try:
            yield aside
        finally:
            for parameter, gradient in aside.items():
                parameter.grad = gradient

    def _momentum(
        self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], skipped: Tensor | None
    ) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        buffer, mine = local(state["momentum_buffer"]), local(gradient)
        factor = torch.full((), group["momentum"], dtype=buffer.dtype, device=buffer.device)
        computed: Tensor = by_element(
            nesterov, [buffer, mine], factor, skipped, compute_dtype(buffer.device, buffer.dtype)
        )
        return computed

    def traffic(self) -> Sent:
        """What this rank sends in a step."""
        whole = self.whole_matrices
        itemsize = self._like({}).itemsize
        return exchanged(sum(whole.to_owners), sum(whole.to_holders), itemsize, bool(whole.cut))

    def _like(self, updates: dict[str, Tensor]) -> Tensor:
        """An empty tensor of the dtype and device on which matrices are computed."""
        example = next(iter(updates.values()), None)
        if example is None:
            example = local(next(parameters_of(self)))
        return torch.empty(0, dtype=compute_dtype(example.device, example.dtype), device=example.device)

    def _update(
        self, parameter: nn.Parameter, direction: Tensor, group: dict[str, Any], skipped: Tensor | None
    ) -> None:
        memory, lr = local(parameter), float(group["lr"])
        decay = lr * group["weight_decay"]
        name, whole = self._name(parameter), self.whole_matrices
        size = SIZE_OF_ADAMW * sqrt(max(rows_and_columns(whole.regions[name].shape, name in whole.stacks)))
        rates = [torch.full((), r, dtype=memory.dtype, device=memory.device) for r in (lr * size, decay)]
        by_element(moved, [memory, direction], *rates, skipped)


def nesterov(buffer: Tensor, gradient: Tensor, factor: Tensor, skipped: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Move momentum, and return where it will be after one more such gradient."""
    if skipped is not None:
        gradient = torch.where(skipped.to(buffer.device) > 0, buffer, gradient)  # then momentum stays as it is
    buffer.lerp_(gradient, 1 - factor)
    return gradient.lerp(buffer, factor).to(dtype)


def moved(memory: Tensor, direction: Tensor, rate: Tensor, decay: Tensor, skipped: Tensor | None) -> None:
    change = direction.to(memory) * rate + memory * decay
    memory.sub_(change if skipped is None else torch.where(skipped.to(memory.device) > 0, 0.0, change))
