"""ZeRO stages 1, 2 and 3 by hand, behind the common face."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_reduce
from lockstep.parallel.blocks import blocks_of
from lockstep.parallel.fully_sharded import FullyShardedDataParallel
from lockstep.parallel.sharded_data_parallel import ShardedDataParallel
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.strategies.base import MakeOptimizer, Strategy
from lockstep.strategies.compiling import compile_blocks
from lockstep.strategies.holdings import Holding
from lockstep.strategies.step import COMPUTE_DTYPES
from lockstep.strategies.wrapped import Wrapped


class Sharded(Strategy):
    """What strategies have in common whose gradients are spread over the ranks."""

    copies = 1
    """Of the whole gradient that the ranks hold together."""

    def gradient_norm(self) -> Tensor:
        """Every rank knows its part: the squares are added up over the ranks."""
        gradients = self.local_gradients()
        norm = nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self.world.device)
        squared = norm.to(self.world.device, torch.promote_types(norm.dtype, torch.float32)).square()
        return all_reduce(squared, group=self.data_group, purpose="norm").div_(self.copies).sqrt()


class HandSharded(Wrapped, Sharded):
    """Stages 1 and 2: a sharded optimizer, and a wrapper that averages gradients to their owners."""

    stage: int
    module: ShardedDataParallel
    optimizer: ShardedOptimizer

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.model = self.place(model)
        self.optimizer = ShardedOptimizer(
            self.trainable() or [nn.Parameter(torch.empty(0))],
            make_optimizer,
            process_group=self.data_group,
            bucket_mb=self.parallel.bucket_mb,
            offload=self.parallel.offload == "cpu",
        )
        self.module = ShardedDataParallel(self.model, self.optimizer, self.stage)

    def local_gradients(self) -> list[Tensor]:
        return [owned.shard.grad for owned in self.optimizer.owned() if owned.shard.grad is not None]

    def held_gradients(self) -> list[Tensor]:
        return [bucket.buffer if self.stage == 1 else bucket.own for bucket in self.module.buckets]

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.inner

    def optimizer_holdings(self) -> list[Holding]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [
            Holding(names[owned.parameter], owned.shard, owned.parameter.shape, owned.piece.inside.start)
            for owned in self.optimizer.owned()
            if owned.parameter in names
        ]

    def full_gradients(self) -> dict[str, Tensor]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            names[parameter]: gradient
            for bucket in self.module.buckets
            for parameter, gradient in zip(bucket.bucket.parameters, bucket.whole_gradients(), strict=True)
            if gradient is not None
        }


class Zero1(HandSharded):
    """Gradients are held whole while micro-batches accumulate, so they meet once per step."""

    stage = 1


class Zero2(HandSharded):
    """Gradients are never whole, so those of each micro-batch are added to the owner's part at once."""

    stage = 2
    gradients_stay_whole = False


class Zero3(Wrapped, Sharded):
    """Units are the model's blocks; what lies outside them is a unit of its own, whole from forward to backward."""

    module: FullyShardedDataParallel
    gradients_stay_whole = False

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.model = model.to(self.world.device, self.dtype)
        compile_blocks(model, self.options)
        blocks = {block for _, block in blocks_of(model)}
        self.module = FullyShardedDataParallel(
            self.model,
            shard=lambda module: module in blocks or module is model,
            compute_dtype=COMPUTE_DTYPES.get(self.options.precision),
            output_dtype=None,  # the loss computes in fp32 whatever it is given
            process_group=self.data_group,
            reshard_after_forward=self.parallel.sharding == "FULL_SHARD",
            prefetch=self.parallel.prefetch,
            offload=self.parallel.offload == "cpu",
        )
        self.optimizer = make_optimizer(self.trainable())

    def compute_precision(self) -> AbstractContextManager[Any]:
        return nullcontext()  # the wrapper casts

    def predict(self, inputs: Tensor) -> Tensor:
        return self.forward(inputs)

    def own_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        return self.module.unreduced_gradients()

    def gradient_norm(self) -> Tensor:
        return self.module.gradient_norm()

    def model_holdings(self) -> list[Holding]:
        return [
            Holding(name, parameter, shape, None if unit.replicated else piece.inside.start)
            for unit, name, parameter, shape, piece in self.module.pieces()
        ]

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.module.full_state_dict()

    def full_gradients(self) -> dict[str, Tensor]:
        return self.module.full_gradients()
