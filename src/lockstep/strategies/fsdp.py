"""PyTorch's own sharding, observed: FSDP2's `fully_shard`, and ZeroRedundancyOptimizer.

Both are imported where they are used: that takes a second, which every rank of every other strategy would pay.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.comm.ledger import Mark, mark
from lockstep.errors import UserError
from lockstep.parallel.blocks import blocks_of
from lockstep.parallel.sharded_module import OUTSIDE
from lockstep.parallel.wrapper import broadcast_module
from lockstep.strategies.base import MakeOptimizer
from lockstep.strategies.compiling import compile_blocks
from lockstep.strategies.ddp import DDP
from lockstep.strategies.fsdp_observed import observe
from lockstep.strategies.holdings import local
from lockstep.strategies.step import COMPUTE_DTYPES
from lockstep.strategies.zero import Sharded


class FSDP(Sharded):
    """`fully_shard` on every block and on the model, by the sharding strategy's name that people know:

    FULL_SHARD      parameters, gradients and optimizer state; parameters are freed after forward
    SHARD_GRAD_OP   the same, but parameters stay whole from forward to backward (ZeRO-2's traffic)
    HYBRID_SHARD    FULL_SHARD among the ranks of a machine, replicated between machines (a 2-D mesh)
    NO_SHARD        replicated everywhere, as DDP
    """

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.model = self.module = model.to(self.world.device, self.dtype)
        broadcast_module(model, self.data_group)  # fully_shard takes each rank's own weights
        compile_blocks(model, self.options)
        if self.world.size > 1 and self.trainable():
            self._shard(model)
        self.optimizer = make_optimizer(self.trainable())

    def _shard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": self._mesh()}
        compute = COMPUTE_DTYPES.get(self.options.precision)
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute and torch.float32)
        if self.parallel.offload == "cpu":
            options["offload_policy"] = CPUOffloadPolicy()
        for _, block in blocks_of(model):
            free = self.parallel.sharding != "SHARD_GRAD_OP"
            fully_shard(block, reshard_after_forward=free, mp_policy=policy, **options)
        # What lies outside the blocks is not freed: backward begins with it.
        fully_shard(model, reshard_after_forward=False, mp_policy=policy, **options)
        for name, module in sharded_modules(model):
            observe(module, name or OUTSIDE, self.world.device)
            if self.world.device.type == "cpu":  # gloo's average has summed
                module.set_force_sum_reduction_for_comms(True)

    def _mesh(self) -> DeviceMesh:
        size, device = self.world.size, self.world.device.type
        self.copies = 1
        self.traffic_is_seen = self.parallel.sharding not in ("NO_SHARD", "HYBRID_SHARD")  # all-reduces between copies
        if self.parallel.sharding == "NO_SHARD":
            self.copies = size
            return init_device_mesh(device, (size, 1), mesh_dim_names=("replicate", "shard"))
        if self.parallel.sharding == "HYBRID_SHARD":
            shard = self.parallel.shard_size or ranks_of_a_copy(size)
            if size % shard:
                raise UserError(f"parallel.shard_size {shard} does not divide the {size} ranks")
            self.copies = size // shard
            return init_device_mesh(device, (size // shard, shard), mesh_dim_names=("replicate", "shard"))
        if self.data_group is not None:
            return DeviceMesh.from_group(self.data_group, device)
        return init_device_mesh(device, (size,))

    def local_gradients(self) -> list[Tensor]:
        """This rank's parts: they may lie on the host, where no backend adds them up."""
        return [local(gradient) for gradient in super().local_gradients()]

    def compute_precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if is_sharded(self.model) else super().compute_precision()  # the policy casts

    def predict(self, inputs: Tensor) -> Tensor:
        """Without a backward nobody frees what forward has gathered, and state is read from sharded parameters."""
        outputs = super().predict(inputs)
        for _, module in sharded_modules(self.model):
            module.reshard()
        return outputs

    def no_gradient_sync(self) -> AbstractContextManager[None]:
        """FSDP2 would keep whole gradients to itself, out of `zero_gradients`' reach: let them meet, and be dropped."""
        return nullcontext()

    def own_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from ()  # FSDP2 keeps them to itself

    def full_state_dict(self) -> dict[str, Tensor]:
        return {name: whole(tensor) for name, tensor in self.model.state_dict().items()}

    def full_gradients(self) -> dict[str, Tensor]:
        return {name: whole(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}


def is_sharded(module: nn.Module) -> bool:
    """`fully_shard` has made it an FSDPModule."""
    return hasattr(module, "set_requires_gradient_sync")


def sharded_modules(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if is_sharded(module)]


def whole(tensor: Any) -> Tensor:
    """Of a DTensor, all of it."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def ranks_of_a_copy(world_size: int) -> int:
    """Hybrid sharding's usual cut: a copy per machine; on one machine, two copies."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return local if local < world_size else max(1, world_size // 2)


class Zero1Torch(DDP):
    """PyTorch's stage 1: DDP averages gradients on every rank, ZeroRedundancyOptimizer shards the state.

    It gives whole parameters to ranks, and each broadcasts what it has updated.
    """

    _broadcasting: tuple[Mark, Mark]
    """From when to when, in the last step."""

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        super().prepare(model, make_optimizer)
        if self.world.size > 1 and self.trainable():
            from torch.distributed.optim import ZeroRedundancyOptimizer

            make: Any = make_optimizer
            self.optimizer = ZeroRedundancyOptimizer(self.trainable(), make, process_group=self.data_group)
            self._time_broadcasts()

    def _time_broadcasts(self) -> None:
        """The optimizer ends its step by broadcasting what each rank has updated, in a method of its own."""
        optimizer: Any = self.optimizer
        broadcast = optimizer._sync_params

        def timed() -> None:
            self._broadcasting = (mark(self.world.device), mark(self.world.device))
            broadcast()
            self._broadcasting = (self._broadcasting[0], mark(self.world.device))

        optimizer._sync_params = timed

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        """Of the parameters that this rank updates."""
        inner: torch.optim.Optimizer = getattr(self.optimizer, "optim", self.optimizer)
        return inner

    def after_optimizer_step(self) -> None:
        """The optimizer has broadcast every parameter, one by one: note them with the time of all."""
        for parameter in self.trainable() if self.world.size > 1 else []:
            entry = self.ledger.add("broadcast", "parameters", self.world.size, parameter.nbytes)
            entry.issued = entry.wait_started = self._broadcasting[0]
            entry.wait_ended = self._broadcasting[1]
