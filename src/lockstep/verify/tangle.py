"""A small model with every trap in it that a wrapper of gradients must survive.

marked      a layer that only some rows of a batch go through: most ranks do not use it, in some steps none does
twice       a layer in two re-entrant checkpoints: its gradient comes in two parts, the second one late
unused      a parameter that takes no part in the loss
frozen      a layer that is not trained: broadcast at the start, never reduced
scale       one element
first       a weight that is not contiguous
projection  a buffer of random numbers: the first rank's counts
steps, seen buffers that forward changes, of whole numbers and of numbers that depend on the rank's samples
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 12


def mark_rows(inputs: Tensor, step: int) -> None:
    """Say which rows are marked, in their first number: one of them, another one at each step; at every third none."""
    inputs[:, 0, 0, 0] = 0.0
    if step % 3 != 2:
        inputs[step % len(inputs), 0, 0, 0] = 1.0


class Layer(nn.Module):
    """A block: every row goes through `always`, marked ones through `marked` as well."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.marked = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        y: Tensor = self.always(x).tanh()
        if len(rows):
            y = y.index_add(0, rows, self.marked(x[rows]))
        return x + y


class Tangle(nn.Module):
    """A model with all that wrappers stumble over: tied, frozen, unused and late parameters."""

    projection: Tensor
    steps: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.first.weight = nn.Parameter(torch.randn(64, WIDTH).mul_(0.1).t())
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(1))
        self.unused = nn.Parameter(torch.rand(3))
        self.head = nn.Linear(WIDTH, 10)
        self.register_buffer("projection", torch.randn(WIDTH, WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, images: Tensor) -> Tensor:
        rows = (images[:, 0, 0, 0] > 0.5).nonzero().flatten()
        if self.training:
            self.steps += 1
            self.seen.mul_(0.9).add_(images.detach().mean(), alpha=0.1)
        x = self.first(images.flatten(1))
        for layer in self.layers:
            x = layer(x, rows)
        if torch.is_grad_enabled():
            for _ in range(2):
                x = checkpoint(lambda t: self.twice(t).tanh(), x, use_reentrant=True)
        else:
            x = self.twice(self.twice(x).tanh()).tanh()
        logits: Tensor = self.head(self.frozen(x) * self.scale + x @ self.projection)
        return logits
