"""AdamW without a schedule: the average of the weights takes the place of a falling learning rate.

Three sequences of weights, of which the model holds y while it trains and x while it is evaluated:

    y = (1 - beta1) z + beta1 x                where gradients are taken
    z <- z - lr (g / (sqrt(v) + eps) + decay y)      the steps of Adam without momentum
    x <- (1 - c) x + c z                       the average of z; c = w / sum of w, w = (the largest lr so far)^2

Only y and z are kept: x = y + (1 - 1 / beta1) (z - y). The rate still needs a warm-up; `train.schedule` is constant.

Element by element, so that a rank steps whatever it holds.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.optimizer.step import loss_of


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """Schedule-free AdamW (Defazio and others, 2024), in any loop and under any wrapper.

        optimizer = lockstep.ScheduleFreeAdamW(model.parameters(), lr=2e-3)

    `evaluation_weight(parameter)` is what to evaluate; `lockstep train` and `lockstep export` take it.
    """

    takes_pieces = True
    """It may be given pieces of tensors."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 < betas[0] < 1 or not 0 <= betas[1] < 1:
            raise UserError(f"betas are {betas}, but the first must be between 0 and 1, the second from 0 to below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, y: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), rate = group["betas"], float(group["lr"])
        state = self.state[y]
        if not state:
            state["z"], state["exp_avg_sq"] = y.detach().clone(), torch.zeros_like(y)
            for key in ("step", "weight_sum", "largest_lr", "beta1"):
                state[key] = torch.full((), beta1 if key == "beta1" else 0.0, dtype=torch.float64)
        elif float(state["beta1"]) != beta1:  # a run goes on with another: y moves, and the average stays
            y.copy_(state["z"].lerp(averaged(y, state["z"], float(state["beta1"])), beta1))
            state["beta1"].fill_(beta1)
        state["step"] += 1
        state["largest_lr"].clamp_(min=rate)
        weight = float(state["largest_lr"]) ** 2
        state["weight_sum"] += weight
        share = weight / total if (total := float(state["weight_sum"])) else 0.0
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrected = state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))
        update = gradient / corrected.sqrt_().add_(group["eps"]) + group["weight_decay"] * y
        y.lerp_(state["z"], share)
        y.add_(update, alpha=rate * (beta1 * (1 - share) - 1))
        state["z"].sub_(update, alpha=rate)

    def evaluation_weight(self, parameter: nn.Parameter) -> Tensor | None:
        """x, the average: what evaluation and export take; None before the first step."""
        state = self.state.get(parameter)
        if not state:
            return None
        return averaged(parameter.detach(), state["z"], float(state["beta1"]))


def averaged(y: Tensor, z: Tensor, beta1: float) -> Tensor:
    """x of y and z."""
    return y + (z - y) * (1 - 1 / beta1)
