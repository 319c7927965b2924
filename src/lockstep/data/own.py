"""Data of the user's own: a function that returns a training and a test set, each of them

two tensors               inputs and targets, first dimension = samples
a Dataset                 samples by number: dataset[i] is (input, target)
an IterableDataset        a stream of (input, target), read from its beginning (the training set only)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from lockstep.config import Data
from lockstep.config.own import called, where_and_what
from lockstep.data.batch import Batch
from lockstep.data.dataset import DataSet, DataSpec, Kind, Samples, Split
from lockstep.errors import UserError


@dataclass
class Mapped:
    """A split of samples by number, each read when it is wanted."""

    dataset: Any
    name: str

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> Batch:
        return collated([self.dataset[i] for i in indices.tolist()], self.name)


@dataclass
class Streamed:
    """A split that can only be read from its beginning. What is there for looking at is its first samples."""

    stream: Any
    name: str

    def samples(self) -> Iterator[Any]:
        """All of them, again and again. A stream that has `set_epoch` is told how often it has been read."""
        for epoch in range(2**62):
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)
            empty = True
            for sample in self.stream:
                empty = False
                yield sample
            if empty:
                raise UserError(f"{self.name}: the stream has no sample")

    def global_batches(self, size: int) -> Iterator[list[Any]]:
        samples = self.samples()
        while True:
            yield list(islice(samples, size))

    def head(self, count: int) -> Samples:
        """The first samples, held in memory."""
        batch = collated(list(islice(self.samples(), count)), self.name)
        return Samples(batch.inputs, batch.targets)

    def __len__(self) -> int:
        raise UserError(f"{self.name} is a stream, which has no length; give --train.steps")

    def batch(self, indices: Tensor) -> Batch:
        raise UserError(f"{self.name} is a stream, whose samples have no numbers")


def collated(samples: list[Any], name: str) -> Batch:
    """Some samples, each (input, target), as one batch."""
    if not isinstance(samples[0], tuple | list) or len(samples[0]) != 2:
        raise UserError(f"{name}: a sample must be (input, target), and is a {type(samples[0]).__name__}")
    try:
        inputs, targets = default_collate(samples)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name}: samples must be (input, target) of one shape: {where_and_what(error)}") from None
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        raise UserError(f"{name}: an input and a target must be tensors or numbers, not {type(inputs).__name__}")
    if targets.dtype == torch.float64:  # what Python's own numbers become
        targets = targets.float()
    return Batch(inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs, targets)


def load_own(data: Data) -> DataSet:
    """What the function that `data.import` names gives."""
    assert data.import_ is not None, "checked with the config"
    name = data.import_
    found = called(name, "data.import", data.args)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise UserError(
            f"data.import {name} must return a training and a test set, and has returned {type(found).__name__}"
        )
    train, test = (split_of(part, f"data.import {name}, {which} set") for part, which in zip(found, KINDS, strict=True))
    if isinstance(test, Streamed):
        raise UserError(f"data.import {name}: the test set is a stream; give a Dataset or tensors, which have a length")
    spec = spec_of(train, data.classes)
    if isinstance(test, Samples) and not test.targets.is_floating_point() and isinstance(train, Samples):
        spec = replace(spec, classes=max(spec.classes, int(test.targets.max()) + 1))
    return DataSet(name, spec, train, test)


KINDS = ("training", "test")


def split_of(given: Any, name: str) -> Split:
    if isinstance(given, tuple | list) and len(given) == 2:
        given = tuple(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in given)
    if isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(t, Tensor) for t in given):
        inputs, targets = given
        if len(inputs) != len(targets):
            raise UserError(f"{name}: {len(inputs):,} inputs and {len(targets):,} targets do not fit together")
        return Samples(inputs, targets)
    if isinstance(given, IterableDataset):
        return Streamed(given, name)
    if hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, Tensor | str | dict):
        if len(given) == 0:
            raise UserError(f"{name} is empty")
        return Mapped(given, name)
    raise UserError(f"{name} must be two tensors, a Dataset or an IterableDataset, and is a {type(given).__name__}")


def first_of(split: Split) -> Batch:
    """A batch of its first sample."""
    first = torch.zeros(1, dtype=torch.long)
    return split.head(1).batch(first) if isinstance(split, Streamed) else split.batch(first)


def spec_of(train: Split, classes: int) -> DataSpec:
    """What one sample looks like, by the first one. `classes`: where nothing says how many there are."""
    batch = first_of(train)
    inputs, targets = batch.inputs[0], batch.targets[0]
    if targets.is_floating_point():
        return DataSpec("regression", tuple(inputs.shape), targets.numel())
    named = getattr(getattr(train, "dataset", None), "classes", None)  # as torchvision's have
    if isinstance(train, Samples):
        classes = int(train.targets.max()) + 1
    elif named is not None:
        classes = named if isinstance(named, int) else len(named)
    kind: Kind = "images" if inputs.dim() == 3 else "other"
    if not inputs.is_floating_point() and inputs.shape == targets.shape:
        kind = "tokens"
    return DataSpec(kind, tuple(inputs.shape), classes)
