"""Linear layers with ReLU between them."""

from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int, layers: int) -> None:
        super().__init__()
        widths = [inputs] + [width] * (layers - 1) + [outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        for layer in self.layers:  # keeps the signal alive through 16 layers
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)  # (batch, features)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        logits: Tensor = self.layers[-1](x)
        return logits

    def forward_flops(self) -> int:
        """Multiplications and additions of one sample's forward pass."""
        return sum(2 * layer.in_features * layer.out_features for layer in self.layers)
