"""PyTorch's own DistributedDataParallel, observed."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.collectives import all_reduce_mean_async
from lockstep.comm.observe import GroupOfDDP
from lockstep.comm.pending import Pending
from lockstep.config import Parallel
from lockstep.layout.group import replicas_of
from lockstep.parallel.data.wrapper import broadcasts_weights
from lockstep.parallel.law import Sent, all_reduce
from lockstep.parallel.pipeline.stage import SYNCHRONIZE
from lockstep.parallel.pipeline.tied import gradient_or_zeros
from lockstep.strategies.engine import Engine
from lockstep.strategies.facts import Facts
from lockstep.strategies.model_sizes import ModelSizes, copies_of

DEFAULT_BUCKET_MB = 25.0
"""Not passed to DDP, as it is the default: only without a value does DDP make its first bucket smaller."""


class DDP(Engine):
    """PyTorch's DistributedDataParallel."""

    sums_tied_last = True
    takes_experts = True
    native_axes = ("cp", "ep")
    reduces_by_chunk = False
    _reduced_in_backward = False

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        compressed = "--parallel.data bucketed --parallel.compression bf16 (half the bytes)"
        return Facts("PyTorch's DistributedDataParallel", advice=(compressed,), smaller="zero1", planned="alone")

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> Sent:
        return all_reduce(sizes.psi * sizes.itemsize, ranks).in_pieces(None)

    def wrap(self, stage: nn.Module) -> None:
        self.model = self.module = stage
        self._experts: list[nn.Parameter] = []
        """That are spread over ranks: DDP does not know of them. In the order in which all ranks reduce them, whatever
        order their gradients become ready in.
        """
        self._ready: set[Tensor] = set()
        self._reducing: dict[Tensor, Pending] = {}
        self._is_last = False
        self.group: GroupOfDDP | None = None
        self._missing: set[Tensor] = set()
        """In a pipeline: parameters that the pass that reduces has given no gradient."""
        self.optimizer = self.options.make_optimizer(self.trainable())
        if self.layout.gradient.size == 1 or not self.trainable():
            return
        experts = {name: p for name, p in stage.named_parameters() if copies_of(p) is not None}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, set(experts))
        self._experts = [p for p in experts.values() if p.requires_grad][::-1]
        for parameter in self._experts:
            parameter.register_post_accumulate_grad_hook(self._expert_ready)
        # Without buffers, DDP broadcasts only once: rank 0's order of buckets, after the first step.
        broadcasts = "buffers" if any(True for _ in stage.buffers()) else "setup"
        self.group = GroupOfDDP(self.layout.gradient, broadcasts)
        self.module = DistributedDataParallel(
            stage,
            process_group=self.group,
            bucket_cap_mb=None if self.parallel.bucket_mb == DEFAULT_BUCKET_MB else self.parallel.bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=broadcasts_weights(),
        )
        for parameter in self.trainable() if self.layout.degrees.pp > 1 else []:
            parameter.register_post_accumulate_grad_hook(self._missing.discard)

    def _expert_ready(self, parameter: Tensor) -> None:
        """In the last micro-batch; in a pipeline, when all passes are over."""
        if self._is_last and self.layout.degrees.pp == 1:
            self._ready.add(parameter)
            self._reduce_experts(self._ready)

    def _reduce_experts(self, ready: Collection[Tensor]) -> None:
        for parameter in self._experts[len(self._reducing) :]:
            if parameter not in ready:
                break
            gradient, replicas = gradient_or_zeros(parameter), replicas_of(parameter, self.layout.gradient)
            self._reducing[parameter] = all_reduce_mean_async(gradient, replicas, purpose="gradients")

    def synchronize(self, last: bool) -> AbstractContextManager[None]:
        self._is_last = last
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        no_sync: AbstractContextManager[None] = self.module.no_sync()
        return no_sync

    def reduce_in_backward(
        self, complete: Collection[Tensor], pending: Collection[Tensor] | None
    ) -> AbstractContextManager[None]:
        """Where one pass adds to all gradients, DDP reduces in it. Its forward, which else prepares the reducer, was
        under `no_sync`; the reducer has no public name (torch's own pipeline stages call it too).
        """
        adds_to = complete if pending is None else pending
        if isinstance(self.module, DistributedDataParallel) and set(self.trainable()) <= set(adds_to):
            self.module.reducer.prepare_for_backward([])
            self._reduced_in_backward = True
            self._missing.update(self.trainable())
        return self.accumulate()

    def reduce_rest(self) -> None:
        """DDP reduces in a backward that reaches every parameter: run one that adds zeros; if the reducing pass has
        missed some parameters, run it for those.
        """
        if isinstance(self.module, DistributedDataParallel) and not self._reduced_in_backward:
            self.module(SYNCHRONIZE).backward()
        elif self._missing:
            torch.stack([0.0 * p.sum() for p in self._missing]).sum().backward()
            self._missing.clear()
        self._reduced_in_backward = False
        self.finish_gradients()

    def finish_gradients(self) -> None:
        if self.group is not None:
            self.group.waits_until_now(self.layout.world.device)
        self._reduce_experts(set(self._experts))
        for pending in self._reducing.values():
            pending.wait()
        self._reducing.clear()
        self._ready.clear()
