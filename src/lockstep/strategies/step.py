"""What a step is told and what it tells: options, sums over the global batch, the result, where its time went."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.comm.collectives import Pending
from lockstep.comm.ledger import Mark, mark, seconds_between
from lockstep.models.loss import LossSum

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32, "fp16": torch.float32}
"""Dtype of the weights for each precision; bf16 and fp16 compute under autocast."""

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class StepOptions:
    """What a step does besides being spread."""

    loss: LossSum
    accumulation: int = 1
    clip_norm: float | None = None
    precision: str = "fp32"
    compile: bool = False
    batch_size: int | None = None
    """Of the global batch, where it is known beforehand."""
    example: Tensor | None = None
    """A batch of one sample's inputs, for an engine that must have computed before it can load."""
    save_trained_only: bool = False
    """Checkpoints leave out what is frozen: the model that adapters were put on is somewhere else already."""


@dataclass
class Totals:
    """Sums over the global batch, on their way while the step goes on."""

    sums: Tensor
    """[sum of losses, correct predictions]"""
    counts: Tensor
    """[targets, ranks that were asked to stop]; complete before the first backward."""
    pending: Pending
    own_loss: Tensor
    """Sum over this rank's samples."""

    def read(self) -> tuple[float, float, float]:
        self.pending.wait()
        loss, correct = self.sums.tolist()
        return loss, correct, float(self.counts[0])


@dataclass
class StepResult:
    """What one step did. `loss` and `accuracy` are on their way until somebody reads them."""

    totals: Totals
    grad_norm: Tensor
    skipped: bool
    """The loss or a gradient was not finite on some rank: no rank has moved its weights."""

    @property
    def loss(self) -> float:
        """Mean over the global batch."""
        loss, _, count = self.totals.read()
        return loss / max(count, 1.0)

    @property
    def accuracy(self) -> float:
        _, correct, count = self.totals.read()
        return correct / max(count, 1.0)

    @property
    def stop(self) -> bool:
        """Some rank was asked to stop before this step began; all ranks know it at the same step."""
        return bool(self.totals.counts[1] > 0)


@dataclass
class Phases:
    """Where the time of a step went, in the order of the step."""

    device: torch.device
    spans: list[tuple[str, Mark, Mark]] = field(default_factory=list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = mark(self.device)
        yield
        self.spans.append((name, start, mark(self.device)))

    def seconds(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for name, start, end in self.spans:
            totals[name] = totals.get(name, 0.0) + seconds_between(start, end)
        return totals
