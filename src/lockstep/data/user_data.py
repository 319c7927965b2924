"""Data of the user's own: a function that returns a training and a test set, each of them

(inputs, targets)         tensors, first dimension = samples
a Dataset                 samples by number: dataset[i] is (input, target)
an IterableDataset        a stream of (input, target), read from its beginning

Inputs are a tensor, for `model(inputs)`; a tuple of them, for `model(*inputs)`; or a dict, for `model(**inputs)`.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from lockstep.config import Data
from lockstep.config.user_code import called, where_and_what
from lockstep.data.batch import Batch, first_rows, tensors_in
from lockstep.data.dataset import DataSet, DataSpec, Kind, Samples, Split, from_pixels
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

    def batches(self, size: int) -> Iterator[list[Any]]:
        """All of it, once."""
        samples = iter(self.stream)
        while batch := list(islice(samples, size)):
            yield batch

    def samples(self) -> Iterator[Any]:
        """All of them, again and again; a stream that has `set_epoch` is given how often it has been read."""
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
    if not isinstance(targets, Tensor):
        raise UserError(f"{name}: a target must be a tensor or a number, not a {type(samples[0][1]).__name__}")
    if not any(t.dim() for t in tensors_in(inputs)):
        raise UserError(
            f"{name}: an input must be a tensor, a number, or a tuple or dict of them, not a "
            f"{type(samples[0][0]).__name__}"
        )
    if targets.dtype == torch.float64:  # what Python's own numbers become
        targets = targets.float()
    return Batch(from_pixels(inputs), targets)


@contextmanager
def drawn_alike(seed: int) -> Iterator[None]:
    """Random numbers that a user's function draws without a seed are the same on every rank."""
    here, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(here)
            np.random.set_state(numpys)


def load_local(data: Data, seed: int = 0) -> DataSet:
    """What the function that `data.import` names gives."""
    assert data.import_ is not None, "checked with the config"
    name = data.import_
    with drawn_alike(seed):
        found = called(name, "data.import", data.args)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise UserError(
            f"data.import {name} must return a training and a test set, and has returned {type(found).__name__}"
        )
    train, test = (split_of(part, f"data.import {name}, {which} set") for part, which in zip(found, KINDS, strict=True))
    spec = spec_of(train, data.classes)
    if isinstance(test, Samples) and not test.targets.is_floating_point() and isinstance(train, Samples):
        spec = replace(spec, classes=max(spec.classes, int(test.targets.max()) + 1))
    return DataSet(name, spec, train, test)


KINDS = ("training", "test")


def split_of(given: Any, name: str) -> Split:
    if isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], Tensor | np.ndarray):
        inputs, targets = (as_tensors(part) for part in given)
        lengths = {len(t) for t in tensors_in(inputs) if t.dim()}
        if lengths:
            if lengths != {len(targets)}:
                rows = " and ".join(f"{length:,}" for length in sorted(lengths))
                raise UserError(f"{name}: {rows} inputs and {len(targets):,} targets do not fit together")
            return Samples(inputs, targets)
    if isinstance(given, IterableDataset):
        return Streamed(given, name)
    if hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, Tensor | str | dict):
        if len(given) == 0:
            raise UserError(f"{name} is empty")
        return Mapped(given, name)
    raise UserError(
        f"{name} must be (inputs, targets), a Dataset or an IterableDataset, and is a {type(given).__name__}"
    )


def as_tensors(given: Any) -> Any:
    """NumPy's arrays, alone or in a nest, as tensors."""
    if isinstance(given, np.ndarray):
        return torch.from_numpy(given)
    if isinstance(given, dict):
        return {key: as_tensors(value) for key, value in given.items()}
    return tuple(as_tensors(value) for value in given) if isinstance(given, tuple | list) else given


def first_of(split: Split) -> Batch:
    """A batch of its first sample."""
    return head_of(split, 1)


def head_of(split: Split, count: int) -> Batch:
    """A batch of its first samples."""
    found = split.head(count) if isinstance(split, Streamed) else split
    return found.batch(torch.arange(min(count, len(found))))


def digest(dataset: DataSet) -> str:
    """Of what a few samples are, and how many there are: ranks compare it."""
    about = hashlib.sha256()
    for split in (dataset.train, dataset.test):
        batch = head_of(split, 4)
        for tensor in tensors_in((batch.inputs, batch.targets)):
            about.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + tensor.cpu().contiguous().numpy().tobytes())
        about.update(b"stream" if isinstance(split, Streamed) else str(len(split)).encode())
    return about.hexdigest()


def spec_of(train: Split, classes: int) -> DataSpec:
    """What one sample looks like, by the first one. `classes`: where nothing says how many there are."""
    batch = first_of(train)
    inputs, targets = first_rows(batch.inputs)[0], batch.targets[0]
    shape = tuple(inputs.shape)
    if targets.is_floating_point():
        return DataSpec("regression", shape, targets.numel(), example=batch.inputs)
    seen = None
    named = getattr(getattr(train, "dataset", None), "classes", None)  # as torchvision's have
    if isinstance(train, Samples):
        classes = int(train.targets.max()) + 1
    elif named is not None:
        classes = named if isinstance(named, int) else len(named)
    else:
        seen = int(head_of(train, 64).targets.max()) + 1
    kind: Kind = "images" if inputs.dim() == 3 else "other"
    if not inputs.is_floating_point() and inputs.shape == targets.shape:
        kind = "tokens"
    return DataSpec(kind, shape, classes, seen, batch.inputs)
