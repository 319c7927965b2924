"""What every data set is: two splits of samples in memory, and a description that models are built from."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lockstep.data.batch import Batch

Kind = Literal["images", "tokens", "regression", "other"]


@dataclass(frozen=True)
class DataSpec:
    """What one sample looks like."""

    kind: Kind
    shape: tuple[int, ...]
    """Of one input: (channels, height, width), (tokens,) or (features,)."""
    classes: int
    """Classes, size of the vocabulary, or outputs of the regression."""


class Split(Protocol):
    """A training or a test set: samples by index."""

    def __len__(self) -> int: ...
    def batch(self, indices: Tensor) -> Batch: ...


@dataclass
class Samples:
    """A split held as two tensors. uint8 inputs are pixels and become floats in [0, 1], per batch."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def batch(self, indices: Tensor) -> Batch:
        indices = indices.to(self.inputs.device, non_blocking=True)
        inputs, targets = self.inputs[indices], self.targets[indices]
        return Batch(inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs, targets)


@dataclass
class Windows:
    """A split of one long token stream: sample i is the i-th window, its targets the same window one token on."""

    stream: Tensor
    context: int

    def __len__(self) -> int:
        return max(0, (self.stream.shape[0] - 1) // self.context)

    def batch(self, indices: Tensor) -> Batch:
        starts = indices.to(self.stream.device)[:, None] * self.context
        tokens = self.stream[starts + torch.arange(self.context + 1, device=self.stream.device)].long()
        return Batch(tokens[:, :-1], tokens[:, 1:])


@dataclass
class DataSet:
    """What `build_data` returns."""

    name: str
    spec: DataSpec
    train: Split
    test: Split
