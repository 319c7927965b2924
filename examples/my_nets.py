"""A model, data and a loss of one's own, for `lockstep train --model.import my_nets:Net --data.import my_nets:make`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Samples = tuple[Tensor, Tensor]


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def make(samples: int = 2000) -> tuple[Samples, Samples]:
    """For training and for testing: each (inputs, targets), a Dataset of (input, target), or an IterableDataset."""
    images = torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    brightest = images.view(samples, 4, 16).mean(2).argmax(1)  # of four stripes
    held_out = samples // 5
    return (images[held_out:], brightest[held_out:]), (images[:held_out], brightest[:held_out])


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)  # a mean
