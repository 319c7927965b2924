"""ZeRO stage 3 by hand. Units are the model's blocks; what lies outside them is a unit of its own."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from lockstep.config import Parallel
from lockstep.data import Inputs, called_with
from lockstep.layout import Held
from lockstep.models.blocks import blocks_of
from lockstep.parallel.law import Sent
from lockstep.parallel.zero.fully_sharded import FullyShardedDataParallel
from lockstep.parallel.zero.law import fully_sharded, gathers
from lockstep.parallel.zero.sharded_module import fill_later
from lockstep.parallel.zero.sharded_stage import ShardedStage
from lockstep.strategies.by_hand import ByHand
from lockstep.strategies.facts import GATHER_ONCE, Facts
from lockstep.strategies.model_sizes import ModelSizes


class FullySharded(ByHand):
    """ZeRO stage 3 by hand, as an engine."""

    takes_any_graph = True
    takes_experts = True
    gathers_ahead = True
    axis = "shard"
    variants = ("SHARD_GRAD_OP",)
    shardings = ("FULL_SHARD", "SHARD_GRAD_OP")
    offloads = ("cpu",)
    fills_parts = True
    casts = True
    module: FullyShardedDataParallel | ShardedStage

    @classmethod
    def variant(cls, parallel: Parallel, option: str) -> Parallel | None:
        return replace(parallel, sharding=cast(Any, option)) if option in cls.shardings else None

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        twice = gathers_twice(parallel)
        ahead = ("--parallel.prefetch 2 (gathers further ahead)",) if parallel.prefetch < 2 else ()
        return Facts(
            says="parameters sharded too: a block is whole only while it computes"
            if parallel.pp == 1
            else "parameters sharded too: a stage is gathered once per step",
            sends="3Ψ(n-1)/n" if twice else "2Ψ(n-1)/n",
            divides=(True, True, True),
            sends_every_micro_batch=parallel.pp == 1,
            advice=(*ahead, GATHER_ONCE) if twice else ahead,
            planned="always",
        )

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> Sent:
        times = gathers(3, parallel.pp > 1, parallel.sharding == "FULL_SHARD")
        blocks = [[prod(shape) for shape in block] for block in sizes.blocks if block]
        outside = [prod(shape) for shape in sizes.outside]
        return fully_sharded(blocks, outside, sizes.trained, times, sizes.gathered, sizes.reduced, ranks)

    def wrap(self, stage: nn.Module) -> None:
        self.model = stage
        blocks = {block for _, block in blocks_of(stage)}
        options: dict[str, Any] = {
            "shard": lambda module: module in blocks or module is stage,
            "compute_dtype": self.options.compute_dtype,
            "reduce_dtype": torch.float32 if self.parallel.reduce_dtype == "fp32" else None,
            "process_group": self.layout.gradient,
            "device": self.layout.world.device,
            "offload": self.parallel.offload == "cpu",
            "initialize": fill_later,
        }
        if self.parallel.pp > 1:
            self.module = ShardedStage(stage, **options)
        else:
            reshard = self.parallel.sharding == "FULL_SHARD"
            # No output dtype: the loss computes in fp32 whatever it is given.
            options |= {"output_dtype": None, "reshard_after_forward": reshard, "prefetch": self.parallel.prefetch}
            self.module = FullyShardedDataParallel(stage, **options)
        self.optimizer = self.options.make_optimizer(self.trainable())

    def synchronize(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()  # gradients are never whole: those of each micro-batch are reduced at once

    def begin_passes(self) -> None:
        assert isinstance(self.module, ShardedStage)
        self.module.begin_step()

    def accumulated_gradient(self, parameter: nn.Parameter) -> Tensor:
        assert isinstance(self.module, ShardedStage)
        return self.module.accumulated_gradient(parameter)

    def predict(self, inputs: Inputs) -> Any:
        return called_with(self.module, inputs)

    def held(self) -> dict[str, Held]:
        return self.module.held()

    def gathered_bytes(self) -> int:
        return self.module.gathered_bytes()

    def gathered_sizes(self) -> tuple[int, list[int]]:
        return self.module.gathered_sizes()

    def gradient_buffers(self) -> list[Tensor]:
        return self.module.gradient_buffers()

    def local_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        return self.module.unreduced_gradients()


def gathers_twice(parallel: Parallel) -> bool:
    """For forward and again for backward; in a pipeline once per step."""
    return parallel.sharding == "FULL_SHARD" and parallel.pp == 1
