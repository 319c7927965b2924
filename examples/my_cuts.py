"""Models that say how they are cut: over matrices (tensor parallel) and over layers (pipeline parallel)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Mixer(nn.Module):
    """A residual MLP without anything that a plan must be called."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, width), nn.Linear(width, 4)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, images: Tensor) -> Tensor:
        x = self.enter(images.flatten(1))
        x = x + self.down(torch.relu(self.up(x)))
        logits: Tensor = self.leave(x)
        return logits

    def tensor_plan(self) -> dict[str, str]:
        """Pairs: a column, something element-wise, a row. What is not named stays whole."""
        return {"up": "column", "down": "row"}


class Tower(nn.Module):
    """Layers in a row, but its forward is its own: it says what activations pass through."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def first(self, images: Tensor) -> Tensor:
        x: Tensor = self.enter(images.flatten(1))
        return x

    def block(self, i: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x + torch.relu(self.blocks[i](x))

    def last(self, x: Tensor) -> Tensor:
        logits: Tensor = self.leave(x)
        return logits

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for i in range(len(self.blocks)):
            x = self.block(i)(x)
        return self.last(x)

    def pipeline_layers(self) -> list[tuple[tuple[str, ...], Callable[[Tensor], Tensor]]]:
        """(names of submodules, function), in order. Every submodule that has parameters stands in one of them."""
        blocks = [((f"blocks.{i}",), self.block(i)) for i in range(len(self.blocks))]
        return [(("enter",), self.first), *blocks, (("leave",), self.last)]
