"""ZeRO stages 1 and 2 by hand: gradients are averaged to their owners only.

Every rank holds the whole model, and `ShardedOptimizer` says which part of each bucket a rank owns. Per step:

1. backward produces gradients from the last layer to the first; when a bucket's are all there, they are laid end to end
   and reduce-scattered: each rank receives the mean of its own part, and nothing else (Ψ(n-1)/n bytes)
2. `finish_gradient_synchronization()` waits; the mean stands in the owner's pieces, and `p.grad` is None
3. the optimizer steps its pieces and gathers the parameters (Ψ(n-1)/n bytes)

That is an all-reduce cut in two, with the optimizer in between: the same bytes as plain data parallelism.

    stage 1   every bucket has its own buffer: gradients are held whole, as in plain data parallelism
    stage 2   one buffer serves all buckets in turn, and each rank keeps its own part only: gradients are never whole.
              While a bucket is on its way, autograd produces the next one's gradients in memory of their own
"""

import weakref

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import (
    Pending,
    new_buffer,
    reduce_scatter_async,
)
from lockstep.comm.ledger import about
from lockstep.errors import UserError
from lockstep.parallel.sharded_optimizer import ParameterBucket, ShardedOptimizer
from lockstep.parallel.wrapper import Flags, GradientWrapper, broadcast_module, check_same_model


class GradientBucket:
    """The gradients that belong to one bucket of parameters."""

    def __init__(self, parameters: ParameterBucket, buffer: Tensor, whole: bool) -> None:
        """`whole`: the buffer is this bucket's own. Else it is shared in turns, and the own part lies elsewhere."""
        self.bucket, self.layout = parameters, parameters.layout
        self.buffer = buffer[: self.layout.length]
        self.views = self.layout.views(self.buffer)
        self.own = self.layout.part(self.buffer, parameters.rank) if whole else torch.zeros_like(parameters.own)
        self.scale = 1.0 / parameters.size
        self.used = [False] * len(self.views)
        """By this rank, since `zero_grad`."""
        self.used_anywhere = list(self.used)
        self.missing = set(range(len(self.views)))
        self.holds_gradients = False
        """The own part has the mean of an earlier backward, to which the next is added."""
        self._pending: Pending | None = None
        self._earlier: Tensor | None = None

    def launch(self) -> None:
        """Lay the gradients end to end, divided by the number of ranks in the same pass, and send them off."""
        self._earlier = self.own.clone() if self.holds_gradients else None
        for index, (parameter, view) in enumerate(zip(self.bucket.parameters, self.views, strict=True)):
            if parameter.grad is None:
                view.zero_()
                continue
            torch.mul(parameter.grad.detach(), self.scale, out=view)
            parameter.grad = None
            self.used[index] = True
        self._pending = reduce_scatter_async(self.own, self.buffer, group=self.bucket.group, purpose="gradients")

    def wait(self) -> None:
        """The mean has come: the own part is complete, and the buffer may be used by others."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            if self._earlier is not None:
                self.own.add_(self._earlier)
                self._earlier = None
            self.holds_gradients = True

    def hand_over(self, used: list[bool]) -> None:
        """Give the owner's pieces their gradients; what no rank used keeps None."""
        self.used_anywhere = used
        for piece, shard in zip(self.bucket.pieces, self.bucket.shards, strict=True):
            shard.grad = self.own[piece.at].to(shard.device) if used[piece.index] else None

    def whole_gradients(self) -> list[Tensor | None]:
        """Each parameter's, gathered from the owners. For looking at: training never needs them."""
        whole = self.layout.gathered(self.own, self.bucket.group)
        return [gradient if used else None for gradient, used in zip(whole, self.used_anywhere, strict=True)]

    def begin_round(self) -> None:
        self.missing = set(range(len(self.views)))

    def forget(self) -> None:
        self.holds_gradients = False
        self.used = [False] * len(self.views)


class ShardedDataParallel(GradientWrapper):
    """Wraps a module whose parameters a `ShardedOptimizer` has; call it like the module.

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    model = ShardedDataParallel(model, optimizer, stage=2)
    model(inputs).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    model.zero_grad()
    """

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer, stage: int = 2) -> None:
        super().__init__(module, optimizer.process_group)
        if stage not in (1, 2):
            raise UserError(f"stage is {stage}, but it must be 1 or 2; stage 3 is FullyShardedDataParallel")
        self.optimizer, self.stage = optimizer, stage
        self._times_zeroed = optimizer.times_zeroed
        self._check_parameters()
        check_same_model(module, self.group)
        broadcast_module(module, self.group)
        self.buckets = self._make_buckets(optimizer.buckets)
        self._launched = 0  # buckets of this round that are on their way: always the first ones
        for number, bucket in enumerate(self.buckets):
            for index, parameter in enumerate(bucket.bucket.parameters):
                self._watch(parameter, number, index)

    def _check_parameters(self) -> None:
        sharded = {p for bucket in self.optimizer.buckets for p in bucket.parameters}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter not in sharded:
                raise UserError(f"parameter {name} is not in the ShardedOptimizer; give it all trainable parameters")

    def _make_buckets(self, buckets: list[ParameterBucket]) -> list[GradientBucket]:
        if self.stage == 1:
            return [GradientBucket(b, self._new_buffer([b]), whole=True) for b in buckets]
        kinds = dict.fromkeys((b.flat.dtype, b.flat.device) for b in buckets)
        alike = {kind: [b for b in buckets if (b.flat.dtype, b.flat.device) == kind] for kind in kinds}
        shared = {kind: self._new_buffer(members) for kind, members in alike.items()}
        return [GradientBucket(b, shared[b.flat.dtype, b.flat.device], whole=False) for b in buckets]

    def _new_buffer(self, buckets: list[ParameterBucket]) -> Tensor:
        like = buckets[0].flat
        return new_buffer(max(b.layout.length for b in buckets), like.dtype, like.device, self.group)

    # ---- backward --------------------------------------------------------------------------------------------

    def _watch(self, parameter: nn.Parameter, number: int, index: int) -> None:
        """Have autograd tell us of each gradient; weakly, as the module may outlive the wrapper."""
        weak_self = weakref.ref(self)

        def gradient_is_there(_: Tensor) -> None:
            wrapper = weak_self()
            if wrapper is None or not wrapper._synchronizing or wrapper._launched > number:
                return  # one that comes when its bucket has left waits for the next round
            missing = wrapper.buckets[number].missing
            missing.discard(index)
            if not missing:
                wrapper._launch_full_buckets()

        parameter.register_post_accumulate_grad_hook(gradient_is_there)

    @torch.no_grad()
    def _launch_full_buckets(self) -> None:
        """In order, as far as they are full: ranks must send the same bucket at the same time."""
        while self._launched < len(self.buckets) and not self.buckets[self._launched].missing:
            self._launch_next()

    def _launch_next(self) -> None:
        if self._launched == 0 and self._times_zeroed != self.optimizer.times_zeroed:
            self._times_zeroed = self.optimizer.times_zeroed
            for bucket in self.buckets:
                bucket.forget()
        if self.stage == 2:
            for earlier in self.buckets[: self._launched]:
                earlier.wait()  # its gradients lie in the same buffer
        with about(f"bucket {self._launched}"):
            self.buckets[self._launched].launch()
        self._launched += 1

    # ---- between backward and the optimizer ------------------------------------------------------------------

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Bring every rank the mean of its own part, added to what earlier calls since `zero_grad` brought.

        Every rank must call it. After several backwards some gradients stand in `p.grad` still, when their bucket has
        left: as long as any rank has such, all go another round.
        """
        if not self._synchronizing:
            return
        if len(self.buckets) != len(self.optimizer.buckets):
            raise UserError("the optimizer has got a parameter group since it was wrapped; wrap the module after that")
        late = True
        while late:
            while self._launched < len(self.buckets):
                self._launch_next()
            late_here = any(p.grad is not None for b in self.buckets for p in b.bucket.parameters)
            device = self.buckets[0].own.device if self.buckets else torch.device("cpu")
            flags = Flags([u for b in self.buckets for u in b.used], late_here, device, self.group)
            for bucket in self.buckets:
                bucket.wait()
                bucket.begin_round()
            self._launched = 0
            used, late = flags.read()
        position = 0
        for bucket in self.buckets:
            bucket.hand_over(used[position : position + len(bucket.views)])
            position += len(bucket.views)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the module's; also forgets the owner's parts."""
        self.optimizer.zero_grad(set_to_none)
        super().zero_grad(set_to_none)
