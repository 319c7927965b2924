"""Data made on the device from a seed: no files, no loading time, and something to learn in each kind."""

import torch
from torch import Tensor

from lockstep.data.dataset import DataSet, DataSpec, Kind, Samples


def make_synthetic(
    kind: Kind,
    shape: tuple[int, ...],
    classes: int,
    samples: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> DataSet:
    """`samples` training samples and an eighth of that for testing, drawn from the same law."""
    generator = torch.Generator(device).manual_seed(seed)
    total = samples + max(1, samples // 8)
    make = {"regression": _regression, "images": _images, "tokens": _tokens}[kind]
    inputs, targets = make(total, shape, classes, generator)
    return DataSet(
        name="synthetic",
        spec=DataSpec(kind, shape, classes),
        train=Samples(inputs[:samples], targets[:samples]),
        test=Samples(inputs[samples:], targets[samples:]),
    )


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _regression(total: int, shape: tuple[int, ...], outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """y = x · w* + noise, with one fixed w*."""
    (features,) = shape
    true_weight = _normal((features, outputs), generator) / features**0.5
    inputs = _normal((total, features), generator)
    return inputs, inputs @ true_weight + 0.1 * _normal((total, outputs), generator)


def _images(total: int, shape: tuple[int, ...], classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One random template per class, seen through noise of its own size."""
    templates = _normal((classes, *shape), generator)
    targets = torch.randint(classes, (total,), generator=generator, device=generator.device)
    return templates[targets] + _normal((total, *shape), generator), targets


def _tokens(total: int, shape: tuple[int, ...], vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A fixed random successor for each token, taken nine times in ten; a random token otherwise."""
    (context,) = shape
    device = generator.device
    successor = torch.randperm(vocabulary, generator=generator, device=device)
    tokens = torch.randint(vocabulary, (total, context + 1), generator=generator, device=device)
    follows = torch.rand((total, context + 1), generator=generator, device=device) < 0.9
    for position in range(1, context + 1):
        previous = successor[tokens[:, position - 1]]
        tokens[:, position] = torch.where(follows[:, position], previous, tokens[:, position])
    return tokens[:, :-1], tokens[:, 1:]
