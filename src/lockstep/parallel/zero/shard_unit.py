"""One unit of fully sharded data parallelism: parameters that are all-gathered, released and reduced together.

A parameter exists twice. Sharded, as the optimizer, `named_parameters()` and the user's code see it, it is the
original `nn.Parameter`, whose data are this rank's piece: k elements in a row, with as many dimensions as before (a
matrix's are 1 x k), so that weight-decay groups by `p.ndim` are the same as in one process. Unsharded, it is a whole
tensor, which replaces the original on the module only while the unit computes:

    sharded     [ piece of p0 | piece of p1 ]                 always; the pieces are p.data
    unsharded   [ p0              | p1      | padding ]       while the unit computes; its memory is released in between

All unsharded tensors are views of one storage, and the shard is one part of it, so an all-gather fills them all without
a copy, and releasing is one call. Autograd saves the unsharded tensors themselves for backward, never a copy; when
the storage is filled again before backward, the saved tensors have their values again.

            prefetch()             unshard()                    reshard()
    SHARDED ----------> GATHERING -----------> UNSHARDED (computes) ----------> SHARDED
            all-gather issued      waited for                   memory released
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_into_async, all_reduce_async, new_buffer, reduce_scatter_async
from lockstep.comm.ledger import about
from lockstep.comm.pending import Pending
from lockstep.layout.group import Group
from lockstep.layout.region import Region, region_of
from lockstep.parallel.zero.flat import FlatLayout, Piece, dense
from lockstep.parallel.zero.unreduced import UnreducedGradients

Owner = tuple[nn.Module, str]
"""A module and the name under which it has a parameter."""


class UnitState(Enum):
    """The state of a unit's parameters."""

    SHARDED = "every rank has its piece"
    GATHERING = "an all-gather is in flight"
    UNSHARDED = "the modules compute with unsharded tensors"


@dataclass
class UnitPlacement:
    """Where a unit computes, where its shard lies, and in which dtypes."""

    device: torch.device
    shard_device: torch.device
    compute_dtype: torch.dtype | None = None
    """None: as the parameters are."""
    reduce_dtype: torch.dtype | None = None
    """The dtype to reduce gradients in that are computed in less than fp32. None: the one they are computed in."""


@dataclass
class Reduction:
    """A reduce-scatter, or an all-reduce, in flight."""

    pending: Pending
    source: Tensor
    """What is reduced: must not be released or written to."""
    target: Tensor
    """Where this rank's part of the sum, or of the mean, arrives."""
    accumulates: bool
    """It is added to the mean of an earlier one."""


class ShardUnit:
    """Parameters of one dtype, all trained or all frozen, of one block."""

    def __init__(
        self,
        owners: dict[nn.Parameter, list[Owner]],
        group: Group,
        placement: UnitPlacement,
        replicated: bool = False,
        name: str = "",
    ) -> None:
        """`name`: of the block. `owners`: every parameter, and the modules that have it; several have a tied one.

        `replicated`: every rank holds all of it, and gradients are all-reduced.
        """
        self.group, self.owners, self.replicated, self.name = group, owners, replicated, name
        self.parameters = list(owners)
        self.rank = 0 if replicated else group.rank
        like = self.parameters[0]
        self.shapes = [p.shape for p in self.parameters]
        self.regions = [region_of(p) for p in self.parameters]
        """Regions of the model's tensors before this unit shards them: other axes may have cut them already."""
        floating = like.dtype.is_floating_point
        self.dtype = placement.compute_dtype if placement.compute_dtype is not None and floating else like.dtype
        narrow = self.dtype.itemsize < 4  # what is computed in fp32 or better is reduced in it
        self.reduce_dtype = placement.reduce_dtype if placement.reduce_dtype is not None and narrow else self.dtype
        self.layout = FlatLayout(self.parameters, 1 if replicated else group.size, self.dtype.itemsize)
        self.pieces: dict[int, Piece] = {piece.index: piece for piece in self.layout.pieces(self.rank)}
        self.trainable = self._not_frozen()
        self.device = placement.device
        self.shard = self._make_shard(like.dtype, placement.shard_device)
        self.resident = replicated and (self.dtype, self.device) == (self.shard.dtype, self.shard.device)
        """The modules compute with the parameters themselves: there is nothing to gather or to release."""
        self._make_unsharded()
        self.state = UnitState.UNSHARDED if self.resident else UnitState.SHARDED
        self._gather: Pending | None = None
        self._expired = False
        self.used = [False] * len(self.parameters)
        """Which parameters this rank has used since the gradients were last zeroed."""
        self.reduced = False
        """Its reduction has been issued in this round."""
        self.gradient: Tensor | None = None
        """This rank's part of the mean gradient, in the parameters' own dtype."""
        self.unreduced = UnreducedGradients(self.unsharded, self.layout, self.reduce_dtype)
        self._reduction: Reduction | None = None
        self._mean_is_kept = False
        """`gradient` has a mean of this round that is not in `.grad` yet: the next one is added to it."""
        self.reshard()

    def _make_unsharded(self) -> None:
        if self.resident:
            self.unsharded = self.parameters
            return
        self.flat_unsharded = torch.empty(self.layout.length, dtype=self.dtype, device=self.device)
        views = zip(self.layout.views(self.flat_unsharded), self.parameters, strict=True)
        self.unsharded = [nn.Parameter(view, parameter.requires_grad) for view, parameter in views]
        # Written through an alias: autograd must not see a refill of the memory as an in-place change of the weights.
        self._memory = self.flat_unsharded.data
        self._storage = self.flat_unsharded.untyped_storage()
        self._nbytes = self._storage.nbytes()

    @torch.no_grad()
    def _make_shard(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """This rank's part, in memory that the backend need not copy; each parameter's data become its piece.

        A parameter on the meta device has no data yet: its piece stays empty until it is filled.
        """
        length = self.layout.part_length
        if self.replicated:
            shard = torch.zeros(length, dtype=dtype, device=device)
        else:
            shard = new_buffer(length, dtype, device, self.group)
        for index, parameter in enumerate(self.parameters):
            piece = self.pieces.get(index)
            if piece is not None and parameter.device.type != "meta":
                shard[piece.at] = parameter.detach().reshape(-1)[piece.inside]
        for index, parameter in enumerate(self.parameters):
            piece = self.pieces.get(index)
            mine = shard[piece.at] if piece is not None else shard[:0]
            if parameter.device.type == "meta":
                replace_meta(parameter, mine, self.owners[parameter])
            parameter.data = mine.view(self.shapes[index] if self.replicated else row_shape(self.shapes[index], mine))
        return shard

    def _not_frozen(self) -> list[int]:
        return [i for i, p in enumerate(self.parameters) if p.requires_grad]

    def follow_freezing(self) -> None:
        """Train what `requires_grad` says now."""
        if (now := self._not_frozen()) == self.trainable:
            return
        self.trainable = now
        for unsharded, parameter in zip(self.unsharded, self.parameters, strict=True):
            unsharded.requires_grad_(parameter.requires_grad)
            if not parameter.requires_grad:
                parameter.grad = None

    def region(self, index: int) -> Region:
        """What this rank holds of a parameter."""
        whole = self.regions[index]
        if self.replicated:
            return whole
        piece = self.pieces.get(index)
        return whole.part(piece.inside.start, piece.inside.stop) if piece is not None else whole.part(0, 0)

    # ---- parameters: prefetch, unshard, reshard --------------------------------------------------------------

    @torch.no_grad()
    def prefetch(self) -> None:
        """Issue the all-gather, unless the unit is unsharded or being gathered."""
        if self.state is not UnitState.SHARDED:
            return
        self._storage.resize_(self._nbytes)
        self.state = UnitState.GATHERING
        if self.layout.parts == 1:
            self._memory.copy_(self.shard)
            self._gather = Pending(None)
            return
        part = self.shard
        if (part.dtype, part.device) != (self.dtype, self.device):
            part = self.layout.part(self._memory, self.rank).copy_(self.shard, non_blocking=True)
        with about(self.name):
            self._gather = all_gather_into_async(self._memory, part, self.group, purpose="parameters")

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded parameters, while they are allocated."""
        return 0 if self.resident else self._nbytes

    @property
    def gathered_bytes(self) -> int:
        """Memory that the unsharded parameters hold at this moment, in use or not."""
        return 0 if self.resident else self._storage.nbytes()

    def unshard(self) -> None:
        """Wait for the all-gather; the modules compute with whole tensors from here on."""
        if self._expired:
            self.reshard()
        self.prefetch()
        if self.state is UnitState.GATHERING:
            self._wait_for_gather()
            self.state = UnitState.UNSHARDED
            self._place(self.unsharded)

    def reshard(self) -> None:
        """Put the pieces back on the modules, and release the memory of the unsharded tensors."""
        if self.resident:
            return
        self._wait_for_gather()
        self.state, self._expired = UnitState.SHARDED, False
        self._place(self.parameters)
        self._storage.resize_(0)

    def _wait_for_gather(self) -> None:
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def expire(self) -> None:
        """A new forward begins: what was gathered for an earlier one is gathered again, as a step may have changed it.
        (Tensors' versions do not show that: a fused optimizer on a GPU writes to the pieces without bumping them.)
        """
        self._expired = self.state is not UnitState.SHARDED and not self.resident

    @torch.no_grad()
    def keep_local_piece(self) -> None:
        """The unsharded tensors have been written to: the shard becomes this rank's part of them."""
        if not self.resident:
            self.shard.copy_(self.layout.part(self._memory, self.rank))

    def _place(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put these parameters on the modules, under their names."""
        for parameter, places in zip(parameters, self.owners.values(), strict=True):
            for module, name in places:
                module._parameters[name] = parameter

    # ---- gradients: reduce, then hand off to `.grad` ---------------------------------------------------------

    @property
    def is_local(self) -> bool:
        """No other rank holds it, and its gradients are where they should be."""
        return self.resident and self.group.size == 1

    def has_gradients(self) -> bool:
        """Whether it has unsharded gradients that have not been reduced."""
        return not self.is_local and any(self.unreduced.get(i) is not None for i in self.trainable)

    @torch.no_grad()
    def issue_reduce(self, buffer: Tensor) -> None:
        """Lay the whole gradients end to end in `buffer`, unless they are there already, and reduce them: each rank
        receives its part.
        """
        self.finish_reduce()
        accumulates = self._mean_is_kept or self._earlier_mean_is_kept()
        if not self._mean_is_kept:
            self._forget_zeroed(all_of_it=not accumulates)
        buffer = buffer[: self.layout.length]
        for index, view in enumerate(self.layout.views(buffer)):
            gradient = self.unreduced.get(index)
            if gradient is None:
                view.zero_()
                continue
            if self._is_divided_before:
                torch.mul(dense(gradient), 1.0 / self.group.size, out=view)
            elif gradient.data_ptr() != view.data_ptr():
                view.copy_(dense(gradient))
            self.used[index] = True
        self.unreduced.drop()
        self.reduced = True
        target = buffer if self.replicated else self._target_of_reduction(accumulates)
        with about(self.name):
            if self.replicated:
                pending = all_reduce_async(buffer, group=self.group, purpose="gradients")
            else:
                pending = reduce_scatter_async(target, buffer, group=self.group, purpose="gradients")
        self._reduction = Reduction(pending, buffer, target, accumulates)

    @property
    def _is_divided_before(self) -> bool:
        """Whether gradients are divided while copied to the buffer; not if the copy changes dtype and would round."""
        return self.reduce_dtype == self.dtype

    def _earlier_mean_is_kept(self) -> bool:
        """Whether a mean was handed off and has not been zeroed since: some parameter still has its gradient.

        In a resident unit, backward itself has added to what is in `.grad`.
        """
        kept = any(self.parameters[i].grad is not None for i in self.trainable)
        return kept and not self.resident and self.gradient is not None

    def _forget_zeroed(self, all_of_it: bool) -> None:
        """Drop gradients, all or some, that were zeroed since they were handed off: nothing is to be added to them."""
        for index in self.trainable:
            if all_of_it or self.parameters[index].grad is None:
                self.used[index] = False
                if not all_of_it and self.gradient is not None and index in self.pieces:
                    self.gradient[self.pieces[index].at] = 0

    def _target_of_reduction(self, accumulates: bool) -> Tensor:
        """The tensor that receives this rank's part: the one in which it stays, if possible."""
        if accumulates or (self.reduce_dtype, self.device) != (self.shard.dtype, self.shard.device):
            return torch.empty(self.layout.part_length, dtype=self.reduce_dtype, device=self.device)
        if self.gradient is None:
            self.gradient = torch.empty_like(self.shard)
        return self.gradient

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for the mean, and add it to what there is already."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        reduction.pending.wait()
        if not self._is_divided_before:
            reduction.target.mul_(1.0 / self.group.size)
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.shard)
        if reduction.accumulates:
            self.gradient.add_(reduction.target.to(self.gradient))
        elif reduction.target is not self.gradient:
            self.gradient.copy_(reduction.target)
        self._mean_is_kept = True

    def hand_over(self, used: list[bool]) -> None:
        """Give each parameter its piece of the mean; what no rank used keeps None."""
        for index in self.trainable if not self.is_local else ():
            parameter, piece = self.parameters[index], self.pieces.get(index)
            if not used[index] or self.gradient is None:
                parameter.grad = None
            else:
                mine = self.gradient[piece.at] if piece is not None else self.gradient[:0]
                parameter.grad = mine.view(parameter.shape)
        self._mean_is_kept = self.reduced = False

    def whole_masters(self) -> list[Tensor]:
        """Every parameter whole, in its own dtype. Every rank must call it."""
        if self.replicated:
            return [p.detach() for p in self.parameters]
        return self.layout.gathered(self.shard.to(self.device), self.group)

    def whole_gradients(self) -> list[Tensor]:
        """Every parameter's mean gradient, whole. Every rank must call it."""
        gradient = torch.zeros_like(self.shard) if self.gradient is None else self.gradient
        if self.replicated:
            return [view.clone() for view in self.layout.views(gradient)]
        return self.layout.gathered(gradient.to(self.device), self.group)

    def forget_gradients(self) -> None:
        """Drop them and their memory."""
        self.finish_reduce()
        self.gradient, self._mean_is_kept, self.reduced = None, False, False
        self.unreduced.drop()
        for parameter in self.parameters:
            parameter.grad = None


def row_shape(whole: torch.Size, piece: Tensor) -> tuple[int, ...]:
    """A piece's shape: its elements in one row, with as many dimensions as the whole (an empty one has at least 1)."""
    elements = piece.numel()
    return (*(1 for _ in whole[:-1]), elements) if len(whole) or elements != 1 else ()


def replace_meta(parameter: nn.Parameter, data: Tensor, places: list[Owner]) -> None:
    """Give a parameter on the meta device memory, and keep it the same Python object."""
    with torch.no_grad():
        real = nn.Parameter(data, parameter.requires_grad)
    torch.utils.swap_tensors(parameter, real)
    for module, name in places:
        module._parameters[name] = parameter
