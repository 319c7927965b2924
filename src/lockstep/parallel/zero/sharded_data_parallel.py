"""ZeRO stages 1 and 2 by hand: each rank receives the mean gradient only of the part that it owns.

Every rank holds the whole model, and `ShardedOptimizer` says which part of each bucket a rank owns. Per step:

1. backward produces gradients from the last layer to the first; when a bucket's are all ready, they are laid end to end
   and reduce-scattered: each rank receives the mean of its own part, and nothing else (Ψ(n-1)/n bytes)
2. when backward is over, all reduce-scatters are waited for; the mean is in the owner's pieces, and `p.grad` is None
3. the optimizer steps its pieces and all-gathers the parameters (Ψ(n-1)/n bytes); with `overlap_gather` the all-gathers
   are in flight while the next forward pass begins, and each block waits for its own

That is an all-reduce cut in two, with the optimizer in between: the same bytes as plain data parallelism.

    stage 1   every bucket has its own buffer: gradients are held whole, as in plain data parallelism
    stage 2   two buffers serve all buckets in turn, and each rank keeps its own part only: gradients are never whole.
              While a bucket is in flight, the next one is laid into the other buffer
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import new_buffer, reduce_scatter_async
from lockstep.comm.ledger import about
from lockstep.comm.pending import Pending
from lockstep.errors import UserError
from lockstep.layout.region import Held
from lockstep.models.blocks import blocks_of
from lockstep.parallel.data.wrapper import Flags, GradientWrapper, broadcast_module, check_same_model
from lockstep.parallel.guards import mark_spread
from lockstep.parallel.optimizer.muon import Muon
from lockstep.parallel.zero.flat import dense
from lockstep.parallel.zero.sharded_optimizer import ParameterBucket, ShardedOptimizer


class GradientBucket:
    """The gradients that belong to one bucket of parameters."""

    def __init__(self, parameters: ParameterBucket, buffer: Tensor, whole: bool) -> None:
        """`whole`: the buffer is for this bucket alone. Else buckets share it, and this rank's part is kept apart."""
        self.bucket, self.layout = parameters, parameters.layout
        self.buffer = buffer[: self.layout.length]
        self.views = self.layout.views(self.buffer)
        self.own = self.layout.part(self.buffer, parameters.group.rank) if whole else torch.zeros_like(parameters.own)
        self.scale = 1.0 / parameters.group.size
        self.used = [False] * len(self.views)
        """Which parameters this rank has used since `zero_grad`."""
        self.used_anywhere = list(self.used)
        self.missing = set(range(len(self.views)))
        self.holds_gradients = False
        """This rank's part has the mean of an earlier backward, to which the next is added."""
        self._pending: Pending | None = None
        self._earlier: Tensor | None = None

    def issue(self) -> None:
        """Lay the gradients end to end, divided by the number of ranks in the same pass, and reduce-scatter them."""
        self._earlier = self.own.clone() if self.holds_gradients else None
        for index, (parameter, view) in enumerate(zip(self.bucket.parameters, self.views, strict=True)):
            if parameter.grad is None:
                view.zero_()
                continue
            torch.mul(dense(parameter.grad), self.scale, out=view)
            parameter.grad = None
            self.used[index] = True
        self._pending = reduce_scatter_async(self.own, self.buffer, group=self.bucket.group, purpose="gradients")

    def wait(self) -> None:
        """Wait for the mean: then this rank's part is complete, and other buckets may use the buffer."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            if self._earlier is not None:
                self.own.add_(self._earlier)
                self._earlier = None
            self.holds_gradients = True

    def hand_over(self, used: list[bool]) -> None:
        """Set the gradients of this rank's pieces; parameters that no rank has used keep None."""
        self.used_anywhere = used
        for piece, shard in zip(self.bucket.pieces, self.bucket.shards, strict=True):
            shard.grad = self.own[piece.at].to(shard.device) if used[piece.index] else None

    def whole_gradients(self) -> list[Tensor | None]:
        """Each parameter's gradient, gathered from the owners. For inspection: training never needs it."""
        whole = self.layout.gathered(self.own, self.bucket.group)
        return [gradient if used else None for gradient, used in zip(whole, self.used_anywhere, strict=True)]

    def begin_round(self) -> None:
        self.missing = set(range(len(self.views)))

    def forget(self) -> None:
        self.holds_gradients = False
        self.used = [False] * len(self.views)


class ShardedDataParallel(GradientWrapper):
    """Wraps a module whose parameters a `ShardedOptimizer` has; call it like the module.

        optimizer = lockstep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        model = lockstep.ShardedDataParallel(model, optimizer, stage=2)
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    All ranks start from the first rank's weights. Stage 2 releases other ranks' parts of a gradient at once.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ShardedOptimizer,
        stage: int = 2,
        manual: bool = False,
        overlap_gather: bool = False,
    ) -> None:
        """`manual`: gradients are the mean only after `finish_gradient_synchronization()`.

        `overlap_gather`: `optimizer.step()` returns with the parameters' all-gathers in flight, and forward waits for
        them, block by block. To read parameters in between, call `optimizer.wait_for_parameters()` first.
        """
        super().__init__(module, optimizer.group, manual)
        if stage not in (1, 2):
            raise UserError(f"stage is {stage}, but it must be 1 or 2; stage 3 is FullyShardedDataParallel")
        self.optimizer, self.stage = optimizer, stage
        self._times_zeroed = optimizer.times_zeroed
        self._check_parameters()
        check_same_model(module, self.group)
        broadcast_module(module, self.group)
        mark_spread((p for b in optimizer.buckets for p in b.parameters), self)
        for parameters in optimizer.buckets:
            parameters.refresh()
        if isinstance(optimizer.inner, Muon):
            optimizer.assign(module)
        self.buckets = self._make_buckets(optimizer.buckets)
        self._issued = 0  # reduce-scatters of this round that are in flight: always those of the first buckets
        self._places: dict[Tensor, tuple[int, int]]
        self._places = {p: (n, i) for n, b in enumerate(self.buckets) for i, p in enumerate(b.bucket.parameters)}
        for parameter in self._places:
            self.watch(parameter)
        optimizer.overlap_gather = overlap_gather
        if overlap_gather:
            self._wait_before_use()

    def _check_parameters(self) -> None:
        sharded = {p for bucket in self.optimizer.buckets for p in bucket.parameters}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter not in sharded:
                raise UserError(f"parameter {name} is not in the ShardedOptimizer; give it all trainable parameters")

    def _make_buckets(self, buckets: list[ParameterBucket]) -> list[GradientBucket]:
        if self.stage == 1:
            return [GradientBucket(b, self._new_buffer([b]), whole=True) for b in buckets]
        found: dict[ParameterBucket, GradientBucket] = {}
        for kind in dict.fromkeys((b.flat.dtype, b.flat.device, b.group) for b in buckets):
            alike = [b for b in buckets if (b.flat.dtype, b.flat.device, b.group) == kind]
            for turn in (alike[::2], alike[1::2]):
                buffer = self._new_buffer(turn) if turn else None
                found |= {b: GradientBucket(b, buffer, whole=False) for b in turn if buffer is not None}
        return [found[b] for b in buckets]

    def _new_buffer(self, buckets: list[ParameterBucket]) -> Tensor:
        like = buckets[0].flat
        return new_buffer(max(b.layout.length for b in buckets), like.dtype, like.device, buckets[0].group)

    # ---- forward -----------------------------------------------------------------------------------------------

    def _wait_before_use(self) -> None:
        """Each block's forward waits for its own parameters, the module's forward for those outside all blocks, which
        may be used anywhere (a tied embedding).
        """
        blocks = [block for _, block in blocks_of(self.module)]
        inside = {parameter for block in blocks for parameter in block.parameters()}
        outside = [p for p in self.module.parameters() if p not in inside]
        order = [*self._wait_in_forward_of(self.module, outside)]
        for block in blocks:
            order += self._wait_in_forward_of(block, block.parameters())
        self.optimizer.gather_order = list(dict.fromkeys([*order, *self.optimizer.buckets[::-1]]))
        self.module.register_state_dict_pre_hook(lambda *_: self.optimizer.wait_for_parameters())

    def _wait_in_forward_of(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> tuple[ParameterBucket, ...]:
        """Returns what it waits for."""
        wanted = set(parameters)
        buckets = tuple(b for b in reversed(self.optimizer.buckets) if not wanted.isdisjoint(b.parameters))

        def before_forward(*_: object) -> None:
            for bucket in buckets:
                bucket.wait()

        if buckets:
            module.register_forward_pre_hook(before_forward, prepend=True)
        return buckets

    # ---- backward --------------------------------------------------------------------------------------------

    def gradient_ready(self, parameter: Tensor) -> None:
        if parameter not in self._places:
            return  # unfrozen since it was wrapped: the optimizer refuses it
        number, index = self._places[parameter]
        if self._issued > number:
            return  # a late one, whose bucket is in flight: it waits for the next round
        missing = self.buckets[number].missing
        missing.discard(index)
        if not missing:
            self._issue_ready_buckets()

    @torch.no_grad()
    def _issue_ready_buckets(self) -> None:
        """In order, as far as buckets are ready: all ranks must issue them in the same order."""
        while self._issued < len(self.buckets) and not self.buckets[self._issued].missing:
            self._issue_next()

    def _issue_next(self) -> None:
        if self._issued == 0 and self._times_zeroed != self.optimizer.times_zeroed:
            self._times_zeroed = self.optimizer.times_zeroed
            for bucket in self.buckets:
                bucket.forget()
        if self.stage == 2:
            memory = self.buckets[self._issued].buffer.data_ptr()
            for earlier in self.buckets[: self._issued]:
                if earlier.buffer.data_ptr() == memory:
                    earlier.wait()  # its gradients lie in the same buffer
        with about(f"bucket {self._issued}"):
            self.buckets[self._issued].issue()
        self._issued += 1

    # ---- when backward is over -------------------------------------------------------------------------------

    def close_round(self) -> None:
        """Give every rank the mean of its own part, added to those of earlier rounds since `zero_grad`.

        After re-entrant checkpointing, or several backwards (manual), some gradients may still be in `p.grad` when
        their bucket has been issued: while any rank has such late gradients, all ranks do another round.
        """
        if len(self.buckets) != len(self.optimizer.buckets):
            raise UserError("the optimizer has got a parameter group since it was wrapped; wrap the module after that")
        late = True
        while late:
            while self._issued < len(self.buckets):
                self._issue_next()
            late_here = any(p.grad is not None for b in self.buckets for p in b.bucket.parameters)
            device = self.buckets[0].own.device if self.buckets else torch.device("cpu")
            flags = Flags([u for b in self.buckets for u in b.used], late_here, device, self.group)
            for bucket in self.buckets:
                bucket.wait()
                bucket.begin_round()
            self._issued = 0
            used, late = flags.read()
        position = 0
        for bucket in self.buckets:
            bucket.hand_over(used[position : position + len(bucket.views)])
            position += len(bucket.views)

    def trained(self) -> dict[str, Held]:
        """This rank's pieces, in the optimizer."""
        return self.optimizer.owned_of(self.module)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the module's; also drops this rank's parts of the mean, and a round that was begun and not closed."""
        if self._round_is_open:
            self._round_is_open = False
            with torch.no_grad():
                self.close_round()
        self.optimizer.zero_grad(set_to_none)
        super().zero_grad(set_to_none)
