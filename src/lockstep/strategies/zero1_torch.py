"""PyTorch's stage 1: DDP averages gradients on every rank, ZeroRedundancyOptimizer shards the state.

It assigns whole parameters to ranks, and each rank broadcasts what it has updated.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.ledger import Mark, active_ledger, mark
from lockstep.config import Parallel
from lockstep.parallel.law import Sent, all_reduce, message
from lockstep.strategies.ddp import DDP
from lockstep.strategies.engine import Engine
from lockstep.strategies.facts import Facts
from lockstep.strategies.model_sizes import ModelSizes


class Zero1Torch(Engine):
    """DDP reduces the gradients; this engine adds the sharded optimizer."""

    sends_after_step = True
    sums_tied_last = True
    reduces_by_chunk = False

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        says = "PyTorch's DDP and ZeroRedundancyOptimizer"
        return Facts(says, sends="2Ψ(n-1)/n + Ψ", divides=(False, False, True), smaller="zero2")

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> Sent:
        """As DDP, and every parameter broadcast by its owner."""
        nbytes = sizes.psi * sizes.itemsize
        return (all_reduce(nbytes, ranks) + message(nbytes)).in_pieces(None)

    def wrap(self, stage: nn.Module) -> None:
        self._ddp = DDP(self.layout, self.options)
        self._ddp.wrap(stage)
        self.model, self.module, self.optimizer = stage, self._ddp.module, self._ddp.optimizer
        if self.layout.gradient.size > 1 and self.trainable():
            from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

            make: Any = self.options.make_optimizer
            group = self.layout.gradient.native
            self.optimizer = ZeroRedundancyOptimizer(self.trainable(), make, process_group=group)
            self._time_broadcasts()

    def _time_broadcasts(self) -> None:
        """Time the method with which the optimizer ends its step: it broadcasts what each rank has updated."""
        optimizer: Any = self.optimizer
        broadcast, device = optimizer._sync_params, self.layout.world.device

        def timed() -> None:
            self._broadcasting: tuple[Mark, Mark] = (mark(device), mark(device))
            broadcast()
            self._broadcasting = (self._broadcasting[0], mark(device))

        optimizer._sync_params = timed

    def synchronize(self, last: bool) -> AbstractContextManager[None]:
        return self._ddp.synchronize(last)

    def reduce_in_backward(
        self, complete: Collection[Tensor], pending: Collection[Tensor] | None
    ) -> AbstractContextManager[None]:
        return self._ddp.reduce_in_backward(complete, pending)

    def reduce_rest(self) -> None:
        self._ddp.reduce_rest()

    def finish_gradients(self) -> None:
        self._ddp.finish_gradients()

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        """Of the parameters that this rank updates."""
        inner: torch.optim.Optimizer = getattr(self.optimizer, "optim", self.optimizer)
        return inner

    def after_write(self) -> None:
        if self.optimizer is not self.local_optimizer:
            broadcasting: Any = self.optimizer
            broadcasting._sync_params()

    def after_step(self) -> None:
        """Record the optimizer's broadcasts, one per parameter, each with the time of all of them."""
        ledger, group = active_ledger(), self.layout.gradient
        for parameter in self.trainable() if group.size > 1 and ledger is not None else []:
            entry = ledger.add("broadcast", "parameters", group, parameter.nbytes)  # type: ignore[union-attr]
            entry.issued = entry.wait_started = self._broadcasting[0]
            entry.wait_ended = self._broadcasting[1]
