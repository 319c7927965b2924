"""PyTorch's own DistributedDataParallel, observed."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.observe import ObservedGroup
from lockstep.config import Parallel
from lockstep.parallel.stage import SYNCHRONIZE
from lockstep.strategies.engine import Engine
from lockstep.strategies.facts import Facts
from lockstep.strategies.theory import ModelSizes, Theory, all_reduce_factor

DEFAULT_BUCKET_MB = 25.0
"""Left to PyTorch where it is its default: only then does it make its first bucket smaller."""


class DDP(Engine):
    """PyTorch's DistributedDataParallel."""

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        compressed = "--parallel.data bucketed --parallel.compression bf16 (half the bytes)"
        return Facts("PyTorch's DistributedDataParallel", advice=(compressed,))

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> Theory:
        return Theory(None, all_reduce_factor(ranks) * sizes.psi * sizes.itemsize)

    def wrap(self, stage: nn.Module) -> None:
        self.model = self.module = stage
        self.group: ObservedGroup | None = None
        self.optimizer = self.options.make_optimizer(self.trainable())
        if self.layout.gradient.size == 1 or not self.trainable():
            return
        # Without buffers, DDP broadcasts only once: rank 0's order of buckets, after the first step.
        broadcasts = "buffers" if any(True for _ in stage.buffers()) else "setup"
        self.group = ObservedGroup(self.layout.gradient, broadcasts)
        self.module = DistributedDataParallel(
            stage,
            process_group=self.group,
            bucket_cap_mb=None if self.parallel.bucket_mb == DEFAULT_BUCKET_MB else self.parallel.bucket_mb,
            gradient_as_bucket_view=True,
        )

    def synchronize(self, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        no_sync: AbstractContextManager[None] = self.module.no_sync()
        return no_sync

    def meet_all(self) -> None:
        """DDP reduces in a backward that every parameter has a part in: here is one, that adds nothing."""
        if isinstance(self.module, DistributedDataParallel):
            self.module(SYNCHRONIZE).backward()
        self.finish_gradients()

    def finish_gradients(self) -> None:
        if self.group is not None:
            self.group.waits_until_now(self.layout.world.device)
