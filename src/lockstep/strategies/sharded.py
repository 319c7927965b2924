"""ZeRO stages 1 and 2 by hand: a sharded optimizer, and a wrapper that averages gradients to their owners."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from lockstep.config import Parallel
from lockstep.layout import Held
from lockstep.parallel.data.law import FIRST_BUCKET_SHARE
from lockstep.parallel.law import Sent
from lockstep.parallel.zero.law import sharded_state
from lockstep.parallel.zero.sharded_data_parallel import ShardedDataParallel
from lockstep.parallel.zero.sharded_optimizer import ShardedOptimizer
from lockstep.strategies.by_hand import ByHand
from lockstep.strategies.facts import Facts
from lockstep.strategies.model_sizes import ModelSizes


class ShardedState(ByHand):
    """`parallel.data` is zero1 or zero2.

    Stage 1 holds unsharded gradients while micro-batches accumulate, so they are reduced once per step; in stage 2 they
    are never held in full: those of each micro-batch are reduced to their owners at once.
    """

    takes_experts = True
    takes_any_graph = True
    axis = "shard"
    offloads = ("cpu",)
    leaves_in_flight = True
    module: ShardedDataParallel
    optimizer: ShardedOptimizer

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        gradients_too = parallel.data == "zero2"
        what = "optimizer state and gradients" if gradients_too else "optimizer state"
        sooner = "--parallel.bucket-mb 5 (smaller buckets are sent sooner)"
        return Facts(
            says=f"{what} sharded; reduce-scatter, then all-gather beside forward",
            divides=(False, gradients_too, True),
            sends_every_micro_batch=gradients_too,
            advice=(sooner,) if parallel.bucket_mb > 5 else (),
            smaller="zero3" if gradients_too else "zero2",
            planned="always",
        )

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> Sent:
        buckets = sizes.buckets(parallel.bucket_mb, FIRST_BUCKET_SHARE)
        return sharded_state(buckets, sizes.trained, sizes.itemsize, ranks)

    def wrap(self, stage: nn.Module) -> None:
        self.model = stage
        self.stage = int(self.parallel.data.removeprefix("zero"))
        self.optimizer = ShardedOptimizer(
            self.trainable() or [nn.Parameter(torch.empty(0))],
            self.options.make_optimizer,
            process_group=self.layout.gradient,
            bucket_mb=self.parallel.bucket_mb,
            offload=self.parallel.offload == "cpu",
        )
        # A model that is compiled as one has no place inside it where a block could wait.
        overlap = self.options.compile != "model"
        manual = self.layout.degrees.pp > 1
        self.module = ShardedDataParallel(stage, self.optimizer, self.stage, manual, overlap_gather=overlap)

    def synchronize(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self.stage == 2 else self.module.no_sync()

    def settle(self) -> None:
        self.optimizer.wait_for_parameters()

    def after_write(self) -> None:
        self.optimizer.gather()

    def after_load(self) -> None:
        self.optimizer.refresh()

    def trained(self) -> dict[str, Held]:
        return self.optimizer.owned_of(self.model)

    def gathers_for(self, module: nn.Module) -> set[str]:
        wanted, buckets = set(module.parameters()), self.optimizer.buckets
        return {f"bucket {i}" for i, bucket in enumerate(buckets) if not wanted.isdisjoint(bucket.parameters)}

    def gradient_memory(self) -> list[Tensor]:
        return [bucket.buffer if self.stage == 1 else bucket.own for bucket in self.module.buckets]

    def gradient_buffers(self) -> list[Tensor]:
        return [bucket.buffer for bucket in self.module.buckets]

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.inner
