"""What a user might write: imported by tests as `tests.own_code:Net`."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)]
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, width), *blocks, nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def samples(count: int = 90) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return inputs, inputs.flatten(1)[:, :4].argmax(1)


class Pair(Net):
    def forward(self, x: Tensor) -> Any:
        return {"scores": super().forward(x), "inputs": x}


def arrays(count: int = 90) -> Any:
    inputs, targets = samples(count)
    return (inputs.numpy(), targets.numpy()), samples(20)


def in_dicts() -> Any:
    inputs, targets = samples()
    return [{"x": x, "y": y} for x, y in zip(inputs, targets, strict=True)], samples(20)


def odd_test() -> Any:
    """A class that only the test set has."""
    inputs, targets = samples()
    return (inputs, targets), (inputs, targets + 4)


def tensors(count: int = 90) -> Any:
    return samples(count), samples(20)


class ByNumber(Dataset[Any]):
    classes = ("a", "b", "c", "d")

    def __init__(self, count: int) -> None:
        self.inputs, self.targets = samples(count)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.inputs[i], int(self.targets[i])


class InARow(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.inputs, self.targets = samples(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.inputs, self.targets, strict=True))


def by_number(count: int = 90) -> Any:
    return ByNumber(count), ByNumber(20)


def in_a_row(count: int = 90) -> Any:
    return InARow(count), ByNumber(20)


def numbers(count: int = 90) -> Any:
    """A regression of 2 numbers from 3."""
    x = torch.randn(count, 3)
    return (x, x[:, :2]), (x[:5], x[:5, :2])


def more_classes() -> Any:
    inputs, targets = samples()
    return (inputs, targets + 1), (inputs, targets)


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


def per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def nothing(step: int, steps: int) -> None:
    """A schedule without a return."""


def linear(step: int, steps: int) -> float:
    return 1 - step / steps


TOLD: list[tuple[str, int]] = []


def told(kind: str, step: int, values: dict[str, Any]) -> None:
    TOLD.append((kind, step))


def not_a_module() -> int:
    return 3


broken = None


def fails(kind: str, step: int, values: dict[str, object]) -> None:
    raise ZeroDivisionError("of the user's own")


class Looks(nn.Module):
    """Looks at a number, which the meta device does not have."""

    def __init__(self, features: int = 16) -> None:
        super().__init__()
        self.only = nn.Linear(features, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.only(inputs.flatten(1))
        return outputs if outputs.sum().item() > 0 else outputs + 1
