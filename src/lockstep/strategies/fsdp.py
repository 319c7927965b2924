"""PyTorch's own sharding, observed: FSDP2's `fully_shard`.

It is imported where it is used: that takes a second, which every rank of every other strategy would pay.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import ceil, prod
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from lockstep.config import Parallel
from lockstep.config.schema import Sharding
from lockstep.data import Inputs
from lockstep.errors import UserError
from lockstep.layout import Degrees, Held
from lockstep.layout.region import Region, is_dtensor, region_of
from lockstep.parallel.blocks import blocks_of
from lockstep.parallel.sharded_module import OUTSIDE
from lockstep.parallel.wrapper import broadcast_module
from lockstep.strategies.engine import Engine
from lockstep.strategies.facts import GATHER_ONCE, Facts
from lockstep.strategies.fsdp_observed import observe
from lockstep.strategies.native_tensor import data_axes
from lockstep.strategies.state import first_names
from lockstep.strategies.theory import ModelSizes, Shape, Theory, gather_factor


class FSDP(Engine):
    """`fully_shard` on every block and on the model, by the sharding strategy's name that people know:

    FULL_SHARD      parameters, gradients and optimizer state; parameters are resharded after forward
    SHARD_GRAD_OP   the same, but parameters stay whole from forward to backward (ZeRO-2's traffic)
    HYBRID_SHARD    FULL_SHARD among the ranks of a machine, replicated between machines (a 2-D mesh)
    NO_SHARD        replicated everywhere, as DDP
    """

    waits_in_backward = True  # FSDP2, on CPU ranks
    axis = "shard"
    variants = ("SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
    shardings = get_args(Sharding)
    offloads = ("cpu",)
    fills_parts = True
    keeps_whole_gradients = False
    sums_tied_last = True

    @classmethod
    def variant(cls, parallel: Parallel, option: str) -> Parallel | None:
        return replace(parallel, sharding=cast(Any, option)) if option in cls.shardings else None

    @classmethod
    def degrees(cls, parallel: Parallel, ranks: int) -> Degrees:
        replicate, shard = parallel.replicate, parallel.shard
        if parallel.sharding == "NO_SHARD":
            return Degrees(replicate=replicate or -1, shard=shard or 1).resolve(ranks)
        if parallel.sharding == "HYBRID_SHARD" and replicate is None and shard is None:
            shard = parallel.shard_size or ranks_of_a_copy(ranks)
            if ranks % shard:
                raise UserError(f"parallel.shard_size {shard} does not divide the {ranks} ranks")
        if shard is None:
            return Degrees(replicate=replicate or 1, shard=-1).resolve(ranks)
        return Degrees(replicate=replicate or -1, shard=shard).resolve(ranks)

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        cut = parallel.sharding != "NO_SHARD"
        sends = {"FULL_SHARD": "3Ψ(n-1)/n", "HYBRID_SHARD": "3Ψ(s-1)/s + 2Ψ(c-1)/(cs)"}
        return Facts(
            says=f"PyTorch's FSDP2, {parallel.sharding}",
            sends=sends.get(parallel.sharding, "2Ψ(n-1)/n"),
            divides=(cut, cut, cut),
            sends_every_micro_batch=True,
            advice=(GATHER_ONCE,) if parallel.sharding == "FULL_SHARD" else (),
        )

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> Theory | None:
        """FSDP2 cuts each parameter along its first dimension, and pads that."""
        if cls.degrees(parallel, ranks).replicate > 1:
            return None  # all-reduces between the copies, which FSDP2 does out of sight
        times = 2 if parallel.sharding == "FULL_SHARD" else 1
        in_blocks = sum(padded_rows(shape, ranks) for block in sizes.blocks for shape in block)
        outside = sum(padded_rows(shape, ranks) for shape in sizes.outside)
        gathered = (times * in_blocks + outside) * sizes.gathered
        return Theory(None, gather_factor(ranks) * (gathered + (in_blocks + outside) * sizes.reduced))

    def wrap(self, stage: nn.Module) -> None:
        self.model = self.module = stage
        self.cuts = {name: region_of(p) for name, p in stage.named_parameters()}
        """What other axes have left of each parameter: `fully_shard` makes new ones, of that."""
        on_meta = any(p.device.type == "meta" for p in stage.parameters())
        if not on_meta:
            broadcast_module(stage, self.layout.gradient)  # fully_shard takes each rank's own weights
        if self.layout.gradient.size > 1 and self.trainable():
            self._shard(stage)
        if on_meta:
            self._give_memory(stage)
        self.casts = is_sharded(stage)  # its policy does
        self.optimizer = self.options.make_optimizer(self.trainable())

    def _shard(self, stage: nn.Module) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        degrees = self.layout.degrees
        copies = degrees.replicate > 1
        self.traffic_is_seen &= not copies  # the all-reduces between them are not
        axes = data_axes(self.layout)
        mesh = self.layout.mesh(*axes)
        if "tp" in self.parallel.native and degrees.tp > 1:
            joint, names = self.layout.mesh(*axes, "tp"), ("replicate", "shard")
            mesh = joint[names] if copies else joint["shard"]
        options: dict[str, Any] = {"mesh": mesh}
        compute = self.options.compute_dtype
        reduce = torch.float32 if compute is not None and self.parallel.reduce_dtype == "fp32" else None
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
        if self.parallel.offload == "cpu":
            options["offload_policy"] = CPUOffloadPolicy()
        for _, block in blocks_of(stage):
            reshard = self.parallel.sharding != "SHARD_GRAD_OP"
            fully_shard(block, reshard_after_forward=reshard, mp_policy=policy, **options)
        # What lies outside the blocks is not resharded: backward begins with it.
        fully_shard(stage, reshard_after_forward=False, mp_policy=policy, **options)
        for name, module in sharded_modules(stage):
            observe(module, name or OUTSIDE, self.layout.world.device)
            if self.layout.world.device.type == "cpu":  # gloo's average has summed
                module.set_force_sum_reduction_for_comms(True)

    def _give_memory(self, stage: nn.Module) -> None:
        """For this rank's shards only; tied parameters stay one."""
        tied = first_names(stage)
        stage.to_empty(device="cpu" if self.parallel.offload == "cpu" else self.layout.world.device)
        for name, first in tied.items():
            if name != first:
                home, _, leaf = name.rpartition(".")
                setattr(stage.get_submodule(home), leaf, stage.get_parameter(first))

    def held(self) -> dict[str, Held]:
        return {name: Held(p, self._region(name, p)) for name, p in self.model.named_parameters()}

    def _region(self, name: str, parameter: Tensor) -> Region:
        cut = self.cuts[name]
        if not (is_sharded(self.model) and is_dtensor(parameter)):
            return cut
        if "tp" not in self.parallel.native:
            return cut.within(region_of(parameter))
        # A DTensor of both axes speaks of the whole tensor; ours has its rows in another order. Of what tensor
        # parallelism has left, FSDP2 gives each rank a run of rows.
        group = self.layout.group("shard", "cp")
        rows = -(-cut.held_shape[0] // group.size)
        start, stop = (min(cut.held_shape[0], rows * r) for r in (group.rank, group.rank + 1))
        return cut.within(Region.slice(cut.held_shape, 0, (start, stop)))

    def predict(self, inputs: Inputs) -> Any:
        """Without a backward nobody reshards what forward has gathered, and state is read from sharded parameters."""
        outputs = super().predict(inputs)
        for _, module in sharded_modules(self.model):
            module.reshard()
        return outputs

    def keep_own_gradients(self) -> AbstractContextManager[None]:
        """FSDP2 would keep whole gradients to itself, out of `zero_gradients`' reach: let them meet, and be dropped."""
        return nullcontext()

    def own_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from ()  # FSDP2 keeps them to itself


def is_sharded(module: nn.Module) -> bool:
    """`fully_shard` has made it an FSDPModule."""
    return hasattr(module, "set_requires_gradient_sync")


def sharded_modules(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if is_sharded(module)]


def padded_rows(shape: Shape, n: int) -> int:
    return ceil(shape[0] / n) * n * prod(shape[1:])


def ranks_of_a_copy(ranks: int) -> int:
    """Hybrid sharding's usual cut: a copy per machine; on one machine, two copies."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return here if here < ranks else max(1, ranks // 2)
