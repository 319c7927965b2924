"""Gradients of one step that differ: what each cause looks at, and what it says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.apart import LEAST
from lockstep.judge.assemble import Part, Place, Side, Tensors, Wholes

CLOSE = 0.02
"""How far from an explanation the gradients may be, relative to the difference that it explains."""


@dataclass
class Cause:
    """What a difference looks like."""

    why: str
    look_at: str
    factor: float | None = None
    first: list[str] = field(default_factory=list)
    """Names that come before those of parameters: BatchNorm modules."""
    expected: str = ""
    got: str = ""


@dataclass
class Difference:
    """Of the gradients of one step."""

    reference: Side
    candidate: Side
    place: Place
    off: dict[str, list[int]]
    """Name -> ranks."""
    wholes: Wholes
    """The reference's."""
    mine: Tensors

    @property
    def is_everywhere(self) -> bool:
        return len(self.off) == len(self.wholes)

    @property
    def first(self) -> str:
        """In backward order."""
        return next(name for name in reversed(list(self.wholes)) if name in self.off)

    @property
    def step_before(self) -> Place:
        number, step = self.place
        return number, step - 1

    def pairs(self) -> Iterator[tuple[str, Part, Tensor, Tensor]]:
        """(name, part, got, expected) of what differs."""
        for name, ranks in self.off.items():
            for part in self.mine.parts[name]:
                if part.rank in ranks:
                    expected = part.of(self.wholes[name])
                    got = self.mine.read(part) if part.stored is not None else torch.zeros_like(expected)
                    yield name, part, got, expected

    def explained_by(self, other: Callable[[str, Part, Tensor], Tensor | None]) -> bool:
        """All that differs is that, and it is not what the reference has."""
        for name, part, got, expected in self.pairs():
            explained = other(name, part, expected)
            if explained is None or float((got - explained).norm()) > CLOSE * max(
                float((got - expected).norm()), LEAST
            ):
                return False
        return True
