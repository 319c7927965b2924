"""A user's linear layer with a custom forward (one that casts its weight, say), cut by tensor parallelism."""

import copy

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.models.lora import LoRALinear

BUILT_IN = (nn.Linear.forward, LoRALinear.forward)


class CustomForward:
    """The layer's forward, called with this rank's part of the weight. Collectives go around it, not into it."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = copy.copy(linear)  # its parameters stay with the layer that is being cut
        self.linear._parameters = dict.fromkeys(linear._parameters)

    @classmethod
    def of(cls, linear: nn.Linear, row: bool) -> "CustomForward | None":
        """None: the layer's forward is a built-in one. `row`: the layer is cut along its input features."""
        if type(linear).forward in BUILT_IN:
            return None
        forward = cls(linear)
        if not linear.weight.is_meta:
            forward._check(linear, row)
        return forward

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        attributes = self.linear.__dict__
        attributes.update(weight=weight, bias=bias)  # found before the module's parameters
        try:
            y: Tensor = self.linear.forward(x)
        finally:
            del attributes["weight"], attributes["bias"]
        return y

    @torch.no_grad()
    def _check(self, linear: nn.Linear, row: bool) -> None:
        """Cut a layer in two: the halves' outputs must add up to the layer's (row), or concatenate to it (column)."""
        weight, bias = linear.weight.detach(), linear.bias
        x = torch.linspace(-1, 1, 2 * linear.in_features, dtype=weight.dtype, device=weight.device).view(2, -1)
        self.linear.eval()
        whole, half = self(x, weight, bias), (linear.in_features if row else linear.out_features) // 2
        if row:
            zeros = None if bias is None else torch.zeros_like(bias)
            parts = self(x[:, :half], weight[:, :half], bias) + self(x[:, half:], weight[:, half:], zeros)
        else:
            biases = (None, None) if bias is None else (bias[:half], bias[half:])
            parts = torch.cat((self(x, weight[:half], biases[0]), self(x, weight[half:], biases[1])), -1)
        self.linear.train(linear.training)
        if not torch.allclose(parts, whole, rtol=1e-3, atol=1e-5 * float(whole.abs().max())):
            how = "add up to its outputs" if row else "give its outputs side by side"
            raise UserError(f"the parts of a {type(linear).__name__}, by its own forward, do not {how}")
