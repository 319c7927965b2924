"""Rows sent to the ranks of their experts, and back: an uneven all-to-all each way, with the opposite one in backward.

Issue and wait are two functions of autograd, so that something can be computed between them, in both directions:

    forward     issue: the rows leave        ...        wait: those of other ranks have arrived
    backward    wait: their gradients leave  ...        issue: those of this rank's rows have arrived
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.comm.collectives import all_to_all_async
from lockstep.comm.ledger import about
from lockstep.comm.pending import Pending
from lockstep.layout.group import Group
from lockstep.models.experts import Experts
from lockstep.models.grouped import Counts
from lockstep.models.sorted_choices import inverse_of

PURPOSE = "activations"
"""What the ledger files rows under, along axis ep."""


class UnevenAllToAll:
    """An all-to-all in flight: first that of rows, then that of their gradients."""

    def __init__(self, name: str, sent: list[int], received: list[int], group: Group, scale: float = 1.0) -> None:
        """`sent`, `received`: rows for each rank, and from each. `scale`: of the gradients when they arrive."""
        self.name, self.sent, self.received, self.group, self.scale = name, sent, received, group, scale
        self._pending = Pending(None)
        self._gradients: Tensor | None = None

    def issue(self, rows: Tensor) -> Tensor:
        """What will have arrived after `wait`."""
        arriving: Tensor = _Issue.apply(rows, self)
        return arriving

    def wait(self, arriving: Tensor) -> Tensor:
        arrived: Tensor = _Wait.apply(arriving, self)
        return arrived

    def start(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arriving = rows.new_empty(sum(received), *rows.shape[1:])
        with about(self.name):
            self._pending = all_to_all_async(arriving, rows.contiguous(), self.group, received, sent, purpose=PURPOSE)
        return arriving

    def finish(self) -> None:
        self._pending.wait()

    def start_back(self, gradients: Tensor) -> None:
        self._gradients = self.start(gradients, self.received, self.sent)

    def finish_back(self) -> Tensor:
        self.finish()
        gradients, self._gradients = self._gradients, None
        assert gradients is not None, "backward waits for what it has issued"
        return gradients if self.scale == 1.0 else gradients.mul_(self.scale)


class _Issue(torch.autograd.Function):
    """The rows leave; in backward their gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, all_to_all: UnevenAllToAll) -> Tensor:
        ctx.all_to_all = all_to_all
        return all_to_all.start(rows, all_to_all.sent, all_to_all.received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.all_to_all.finish_back(), None


class _Wait(torch.autograd.Function):
    """Rows have arrived; in backward their gradients leave."""

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, all_to_all: UnevenAllToAll) -> Tensor:
        ctx.all_to_all = all_to_all
        all_to_all.finish()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.all_to_all.start_back(gradient)
        return gradient, None  # it is not read: `_Issue` returns what arrives


@dataclass
class TokenExchange:
    """This rank's rows at the experts of all ranks, and all ranks' rows at its own."""

    table: list[list[int]]
    """Rank -> expert -> rows."""
    on_device: Tensor
    """The same numbers."""
    group: Group
    averaged: int = 1
    """By how much gradients of experts are divided."""
    name: str = ""

    @property
    def held(self) -> int:
        """Experts of a rank."""
        return len(self.table[0]) // self.group.size

    def rows_between(self, sender: int, receiver: int) -> list[int]:
        """For each expert of the receiver."""
        return self.table[sender][receiver * self.held : (receiver + 1) * self.held]

    @cached_property
    def sent(self) -> list[int]:
        return [sum(self.rows_between(self.group.rank, to)) for to in range(self.group.size)]

    @cached_property
    def received(self) -> list[int]:
        return [sum(self.rows_between(sender, self.group.rank)) for sender in range(self.group.size)]

    def dispatch(self) -> UnevenAllToAll:
        return UnevenAllToAll(f"dispatch{self.name}", self.sent, self.received, self.group, float(self.averaged))

    def combine(self) -> UnevenAllToAll:
        return UnevenAllToAll(f"combine{self.name}", self.received, self.sent, self.group, 1.0 / self.averaged)

    def results(self, experts: Experts, rows: Tensor) -> Tensor:
        """What this rank's experts make of the rows that have arrived, in the same order."""
        rank, ranks = self.group.rank, range(self.group.size)
        known = [sum(column) for column in zip(*(self.rows_between(sender, rank) for sender in ranks), strict=True)]
        mine = self.on_device[:, rank * self.held : (rank + 1) * self.held]
        grouped = Counts(mine.sum(0), known)
        if self.held == 1:
            found: Tensor = experts(rows, grouped)
            return found
        # They lie rank by rank, and expert by expert within.
        numbers = torch.arange(self.held, device=mine.device).repeat(len(ranks))
        order = numbers.repeat_interleave(mine.flatten(), output_size=sum(known)).argsort(stable=True)
        back = inverse_of(order)
        results: Tensor = experts(_Reorder.apply(rows, order, back), grouped)
        reordered: Tensor = _Reorder.apply(results, back, order)
        return reordered


class _Reorder(torch.autograd.Function):
    """Rows in another order, and back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.back), None, None
