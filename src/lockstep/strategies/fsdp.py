"""PyTorch's own sharding, observed: FSDP2's `fully_shard`.

It is imported where it is used: that takes a second, which every rank of every other strategy would pay.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from lockstep.layout.group import replicas_of
from lockstep.layout.region import Region, is_dtensor, region_of
from lockstep.models.blocks import blocks_of
from lockstep.models.experts import mixtures_in
from lockstep.parallel.data.wrapper import broadcast_module
from lockstep.parallel.law import Sent, Shape
from lockstep.parallel.zero.law import fsdp2, gathers
from lockstep.parallel.zero.sharded_module import OUTSIDE
from lockstep.strategies.engine import Engine
from lockstep.strategies.facts import GATHER_ONCE, Facts
from lockstep.strategies.fsdp_observed import end_backward, is_complete, observe, overlap_reductions, reduce_now, widen
from lockstep.strategies.model_sizes import ModelSizes, copies_of
from lockstep.strategies.native_mesh import data_axes, group_mesh, native_mesh
from lockstep.strategies.state import first_names


class FSDP(Engine):
    """`fully_shard` on every block and on the model, selected by the names of FSDP1's sharding strategies:

    FULL_SHARD      parameters, gradients and optimizer state; parameters are resharded after forward
    SHARD_GRAD_OP   the same, but parameters stay whole from forward to backward (ZeRO-2's traffic)
    HYBRID_SHARD    FULL_SHARD among the ranks of a machine, replicated between machines (a 2-D mesh)
    NO_SHARD        replicated everywhere, as DDP
    """

    waits_in_backward = True  # FSDP2, on CPU ranks
    axis = "shard"
    takes_experts = True
    variants = ("SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
    shardings = get_args(Sharding)
    offloads = ("cpu",)
    native_axes = ("tp", "cp", "ep")
    fills_parts = True
    shows_local_gradients = False
    reshards_micro_batches = True
    _kept: list[Any]
    """In a pipeline's step: blocks whose gradients have not been reduced."""
    _in_flight: list[Any]
    """In a pipeline's step: what is being reduced."""
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
    def check(cls, parallel: Parallel, precision: str, compiled: bool) -> None:
        if parallel.reshard_micro_batches and parallel.schedule.startswith("zb-"):
            raise UserError(
                f"parallel.reshard_micro_batches reduces gradients when a backward pass ends, and {parallel.schedule} "
                f"computes those of the weights later; use 1f1b, or leave it out"
            )

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        cut, once = parallel.sharding != "NO_SHARD", parallel.pp > 1 and not parallel.reshard_micro_batches
        sends = {} if once else {"FULL_SHARD": "3Ψ(n-1)/n", "HYBRID_SHARD": "3Ψ(s-1)/s + 2Ψ(c-1)/(cs)"}
        return Facts(
            says=f"PyTorch's FSDP2, {parallel.sharding}",
            sends=sends.get(parallel.sharding, "2Ψ(n-1)/n"),
            divides=(cut, cut, cut),
            sends_every_micro_batch=not once,
            advice=(GATHER_ONCE,) if parallel.sharding == "FULL_SHARD" and not once else (),
        )

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> Sent | None:
        degrees = cls.degrees(parallel, ranks)
        times = gathers(3, parallel.pp > 1, parallel.sharding in ("FULL_SHARD", "HYBRID_SHARD"))
        blocks = [shape for block in sizes.blocks for shape in block]
        shards, copies = ranks // degrees.replicate, degrees.replicate
        return fsdp2(blocks, sizes.outside, times, sizes.gathered, sizes.reduced, shards, copies)

    def wrap(self, stage: nn.Module) -> None:
        self.model = self.module = stage
        self._complete: set[Tensor] = set()
        self._in_flight = []
        self.cuts = {name: region_of(p) for name, p in stage.named_parameters()}
        """Each parameter's region after other axes have cut it: `fully_shard` makes new parameters from that."""
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
        axes = data_axes(self.layout)
        mesh = native_mesh(self.layout, *axes)
        if "tp" in self.parallel.native and degrees.tp > 1:
            joint, names = native_mesh(self.layout, *axes, "tp"), ("replicate", "shard")
            mesh = joint[names] if copies else joint["shard"]
        options: dict[str, Any] = {"mesh": mesh}
        compute = self.options.compute_dtype
        reduce = torch.float32 if compute is not None and self.parallel.reduce_dtype == "fp32" else None
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
        if self.parallel.offload == "cpu":
            options["offload_policy"] = CPUOffloadPolicy()
        reshard = self.parallel.sharding != "SHARD_GRAD_OP" and not self._keeps_unsharded
        alone = self._shard_experts(stage, {**options, "mp_policy": policy, "reshard_after_forward": reshard})
        for _, block in blocks_of(stage):
            fully_shard(block, reshard_after_forward=reshard, mp_policy=policy, ignored_params=alone, **options)
        # What lies outside the blocks is not resharded: backward begins with it.
        fully_shard(stage, reshard_after_forward=False, mp_policy=policy, ignored_params=alone, **options)
        modules = sharded_modules(stage)
        if self._keeps_unsharded:
            self._in_flight = overlap_reductions(stage, [module for _, module in modules])
        for name, module in modules:
            observe(module, name or OUTSIDE, self.layout.world.device)
            if self.layout.world.device.type == "cpu":  # gloo's AVG has returned sums
                module.set_force_sum_reduction_for_comms(True)

    def _shard_experts(self, stage: nn.Module, options: dict[str, Any]) -> set[nn.Parameter]:
        """Experts that are spread over ranks, over those that hold the same ones. Returns those of which there is no
        other copy: FSDP2 leaves them alone.
        """
        from torch.distributed.fsdp import fully_shard

        alone: set[nn.Parameter] = set()
        for mixture in mixtures_in(stage).values():
            parameters = list(mixture.experts.parameters())
            replicas = replicas_of(parameters[0], self.layout.gradient)
            if replicas.size == 1:
                alone |= set(parameters)
            elif replicas != self.layout.gradient:
                fully_shard(mixture.experts, **{**options, "mesh": group_mesh(self.layout, replicas)})
        return alone

    @property
    def _keeps_unsharded(self) -> bool:
        """In a pipeline: a block stays unsharded, gradients too, until the last pass that adds to its gradients."""
        return self.parallel.pp > 1 and not self.parallel.reshard_micro_batches

    # ---- the passes of a pipeline ------------------------------------------------------------------------------

    def begin_passes(self) -> None:
        """Gather all of the stage: later stages are idle until the first micro-batch reaches them."""
        for _, module in sharded_modules(self.model) if self._keeps_unsharded else []:
            module.unshard(async_op=self.layout.world.device.type == "cuda")  # on the CPU FSDP2 waits at once

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        if self._keeps_unsharded:
            self._reduce_in_backward_of([])
        yield
        for module in self._kept if self._keeps_unsharded and self.options.compute_dtype is not None else []:
            widen(module)

    @contextmanager
    def reduce_in_backward(self, complete: Collection[Tensor], pending: Collection[Tensor] | None) -> Iterator[None]:
        """FSDP2 reduces a block when its backward ends. It does not know about weight passes, which come later: there
        blocks are reduced when the pass is over.
        """
        self._complete |= set(complete)
        modules = [module for module in self._kept if is_complete(module, self._complete)]
        if len(modules) < len(self._kept) and self.model in modules:
            modules.remove(self.model)  # every backward gathers what lies outside the blocks
        self._kept = [module for module in self._kept if module not in modules]
        if not self._keeps_unsharded or not modules:
            with self.accumulate():
                yield
            return
        self._reduce_in_backward_of(modules if pending is None else [])
        yield
        if pending is not None:
            self._reduce_in_backward_of(modules)
            for module in reversed(modules):
                reduce_now(module)
            end_backward(self.model)

    def zero_gradients(self) -> None:
        super().zero_gradients()
        self._complete.clear()
        self._kept = [module for _, module in sharded_modules(self.model)]

    def finish_gradients(self) -> None:
        if self._keeps_unsharded and is_sharded(self.model):
            end_backward(self.model, is_last=True)
            self._in_flight.clear()

    def _reduce_in_backward_of(self, modules: list[Any]) -> None:
        """The next backward reduces gradients and releases parameters of these blocks; the others keep both."""
        for _, module in sharded_modules(self.model):
            module.set_requires_gradient_sync(module in modules, recurse=False)
            module.set_reshard_after_backward(module in modules, recurse=False)
            module.set_is_last_backward(False)  # at whose end the compute stream waits for all reductions

    def release(self) -> None:
        for _, module in sharded_modules(self.model):
            module.reshard()

    @classmethod
    def tied_elements(cls, shape: Shape, rank: int, ranks: int) -> int:
        """The rank's rows of the gradient: it holds only those when the stages' gradients are summed."""
        rows = ceil(shape[0] / ranks)
        return max(0, min(shape[0], rows * (rank + 1)) - rows * rank) * prod(shape[1:])

    def _give_memory(self, stage: nn.Module) -> None:
        """For this rank's shards only; tied parameters stay one."""
        tied, marks = first_names(stage), {name: vars(p).copy() for name, p in stage.named_parameters()}
        stage.to_empty(device="cpu" if self.parallel.offload == "cpu" else self.layout.world.device)
        for name, parameter in stage.named_parameters():
            vars(parameter).update(marks.get(name, {}))  # a DTensor gets memory as another tensor
            if copies_of(parameter) == 1:  # FSDP2 does not take it to the device
                parameter.data = parameter.data.to(self.layout.world.device)
        for name, first in tied.items():
            if name != first:
                home, _, leaf = name.rpartition(".")
                setattr(stage.get_submodule(home), leaf, stage.get_parameter(first))

    def held(self) -> dict[str, Held]:
        return {name: Held(p, self._region(name, p)) for name, p in self.model.named_parameters()}

    def _region(self, name: str, parameter: Tensor) -> Region:
        cut = self.cuts[name]
        if not (is_sharded(self.model) and is_dtensor(parameter)) or copies_of(parameter) == 1:
            return cut
        if "tp" not in self.parallel.native:
            return cut.within(region_of(parameter))
        # A DTensor over both axes describes the whole tensor, but our rows are in another order. FSDP2 gives each
        # rank a run of the rows that tensor parallelism has left.
        group = self.layout.group("shard", "cp")
        rows = -(-cut.held_shape[0] // group.size)
        start, stop = (min(cut.held_shape[0], rows * r) for r in (group.rank, group.rank + 1))
        return cut.within(Region.slice(cut.held_shape, 0, (start, stop)))

    def predict(self, inputs: Inputs) -> Any:
        """Without a backward nothing reshards what forward has gathered, and state is read from sharded parameters."""
        outputs = super().predict(inputs)
        self.release()
        return outputs

    def keep_local_gradients(self) -> AbstractContextManager[None]:
        """FSDP2 would keep unsharded gradients where `zero_gradients` cannot drop them: so they are reduced instead."""
        return nullcontext()

    def local_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from ()  # FSDP2 keeps them to itself


def is_sharded(module: nn.Module) -> bool:
    """`fully_shard` has made it an FSDPModule."""
    return hasattr(module, "set_requires_gradient_sync")


def sharded_modules(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if is_sharded(module)]


def ranks_of_a_copy(ranks: int) -> int:
    """Hybrid sharding's default: one copy per machine; on one machine, two copies."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return here if here < ranks else max(1, ranks // 2)
