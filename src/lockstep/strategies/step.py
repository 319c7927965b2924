"""Inputs and results of a step: how the model is cut, sums over the global batch, where its time went."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.ledger import Mark, mark, seconds_between
from lockstep.comm.pending import Pending
from lockstep.models.loss import Measure


@dataclass(frozen=True)
class Cut:
    """What a worker must know of a model that axes have cut."""

    measure: Measure | None = None
    """Computes the loss where outputs are cut; None: the ordinary loss."""
    around_passes: Callable[[], AbstractContextManager[None]] = nullcontext
    """To be entered around every forward and backward."""
    has_experts: bool = False
    """Some stage has."""
    balances_experts: bool = False
    """Some stage has experts whose auxiliary loss depends on what they are used for in the whole step."""


@dataclass
class Totals:
    """Sums over the global batch, in flight while the step goes on."""

    sums: Tensor
    """[sum of losses, correct predictions]"""
    counts: Tensor
    """[targets, ranks that were asked to stop, ranks that want a checkpoint]; complete before the first backward."""
    pending: Pending
    local_loss: Tensor
    """Sum over this rank's samples; 0 on a rank that computes no loss."""

    def read(self) -> tuple[float, float, float]:
        self.pending.wait()
        loss, correct = self.sums.tolist()
        return loss, correct, float(self.counts[0])


class ToHost:
    """Numbers that are being copied from a GPU to the host. A reader waits for them, but not for what was queued later:
    so the host can read the results of one step while the device runs the next.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record()

    def read(self) -> list[float]:
        self._there.synchronize()
        values: list[float] = self._values.tolist()
        return values


class Numbers(NamedTuple):
    """The results of a step that the host reads."""

    loss_sum: float
    correct: float
    targets: float
    stops: float
    """Ranks that were asked to stop."""
    saves: float
    """Ranks that want a checkpoint."""
    grad_norm: float


@dataclass
class StepResult:
    """What one step did; in flight until it is read."""

    totals: Totals
    grad_norm: Tensor
    stepped: bool | None
    """None: the optimizer has decided on the device, from whether the norm is finite."""
    _sent: ToHost | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        sums, counts = self.totals.sums, self.totals.counts
        if sums.is_cuda:
            self.totals.pending.wait()  # the stream waits, not the host
            self._sent = ToHost(torch.cat((sums, counts, self.grad_norm.to(sums).reshape(1))))

    def numbers(self) -> Numbers:
        """Waits for them."""
        if self._sent is not None:
            return Numbers(*self._sent.read())
        self.totals.pending.wait()
        return Numbers._make([*self.totals.sums.tolist(), *self.totals.counts.tolist(), float(self.grad_norm)])

    @property
    def loss(self) -> float:
        """Mean over the global batch."""
        numbers = self.numbers()
        return numbers.loss_sum / max(numbers.targets, 1.0)

    @property
    def accuracy(self) -> float:
        numbers = self.numbers()
        return numbers.correct / max(numbers.targets, 1.0)

    @property
    def skipped(self) -> bool:
        """The loss or a gradient was not finite on some rank: no rank has moved its weights."""
        return not (isfinite(self.numbers().grad_norm) if self.stepped is None else self.stepped)

    @property
    def stop(self) -> bool:
        """Some rank was asked to stop before this step began; all ranks know it at the same step."""
        if self._sent is None:
            return bool(self.totals.counts[1] > 0)  # there before backward began; the loss may still be in flight
        return self.numbers().stops > 0

    @property
    def save(self) -> bool:
        """Some rank wanted a checkpoint before this step began; all ranks know it at the same step."""
        return bool(self.totals.counts[2] > 0) if self._sent is None else self.numbers().saves > 0


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
