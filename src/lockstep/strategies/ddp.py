"""PyTorch's own DistributedDataParallel, observed."""

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.observe import ObservedGroup
from lockstep.strategies.base import MakeOptimizer, Strategy

DEFAULT_BUCKET_MB = 25.0
"""Left to PyTorch where it is its default: only then does it make its first bucket smaller."""


class DDP(Strategy):
    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.model = self.module = self.place(model)
        self.group: ObservedGroup | None = None
        self.optimizer = make_optimizer(self.trainable())
        if self.world.size == 1 or not self.trainable():
            return
        group = self.data_group or dist.group.WORLD
        assert group is not None
        # Without buffers, DDP broadcasts only once: rank 0's order of buckets, after the first step.
        self.group = ObservedGroup(group, broadcasts="buffers" if any(True for _ in model.buffers()) else "setup")
        self.module = DistributedDataParallel(
            self.model,
            process_group=self.group,
            bucket_cap_mb=None if self.parallel.bucket_mb == DEFAULT_BUCKET_MB else self.parallel.bucket_mb,
            gradient_as_bucket_view=True,
        )

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        no_sync: AbstractContextManager[None] = self.module.no_sync()
        return no_sync

    def finish_gradients(self) -> None:
        if self.group is not None:
            self.group.waits_until_now(self.world.device)
