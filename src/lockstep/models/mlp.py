"""Linear layers with ReLU between them."""

from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of one width, with an activation between them."""

    def __init__(self, inputs: int, width: int, outputs: int, layers: int) -> None:
        super().__init__()
        widths = [inputs] + [width] * (layers - 1) + [outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        for layer in self.layers:
            self.initialize(layer)

    @staticmethod
    def initialize(module: nn.Module) -> None:
        """Fill one module's own parameters."""
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")  # keeps the signal alive through 16 layers
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)  # (batch, features)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        logits: Tensor = self.layers[-1](x)
        return logits

    def tensor_plan(self) -> dict[str, str]:
        """What tensor parallelism cuts: pairs of layers; one that is left over at the end is gathered."""
        plan = {f"layers.{i}": "row" if i % 2 else "column" for i in range(len(self.layers))}
        return {**plan, f"layers.{len(self.layers) - 1}": "column:gather"} if len(self.layers) % 2 else plan

    def forward_flops(self) -> int:
        """Multiplications and additions of one sample's forward pass."""
        return 2 * sum(p.numel() for p in self.parameters() if p.dim() == 2)
