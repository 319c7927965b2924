"""What every data set is: two splits of samples in memory, and a description that models are built from."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from lockstep.data.batch import Batch, Inputs, mapped

Kind = Literal["images", "tokens", "regression", "other"]


@dataclass(frozen=True)
class DataSpec:
    """What one sample looks like."""

    kind: Kind
    shape: tuple[int, ...]
    """Of one input: (channels, height, width), (tokens,) or (features,)."""
    classes: int
    """Classes, size of the vocabulary, or outputs of the regression."""
    seen: int | None = None
    """Where `classes` is what the config says: the classes that the first samples show."""
    example: Inputs = field(default=None, compare=False, repr=False)
    """Inputs of one sample, as a batch, where `shape` does not say it all: of a user's data."""

    def inputs(self, samples: int, device: torch.device | str = "cpu") -> Inputs:
        """For trying out a model: zeros, or so many of the example."""
        if self.example is None:
            dtype = torch.int64 if self.kind == "tokens" else None
            return torch.zeros((samples, *self.shape), dtype=dtype, device=device)
        return mapped(self.example, lambda t: t.expand(samples, *t.shape[1:]).to(device) if t.dim() else t.to(device))


class Split(Protocol):
    """A training or a test set: samples by index."""

    def __len__(self) -> int: ...
    def batch(self, indices: Tensor) -> Batch: ...


@dataclass
class Samples:
    """A split held in memory: inputs, one tensor or several, and targets."""

    inputs: Inputs
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: Tensor) -> Batch:
        indices = indices.to(self.targets.device, non_blocking=True)
        inputs = mapped(self.inputs, lambda t: t[indices] if t.dim() else t)
        return Batch(from_pixels(inputs), self.targets[indices])


def from_pixels(inputs: Inputs) -> Inputs:
    """uint8 images are pixels and become floats in [0, 1]; several inputs stay as they are."""
    return inputs.float() / 255 if isinstance(inputs, Tensor) and inputs.dtype == torch.uint8 else inputs


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
