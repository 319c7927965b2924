"""One unit of fully sharded data parallelism: parameters that are gathered, freed and reduced together.

A parameter has two bodies. The one that the optimizer, `named_parameters()` and everybody outside knows is the
original `nn.Parameter`, whose data are this rank's piece, 1-D. The one that computes is a whole tensor, put in the
original's place on the module only while the unit is gathered:

    shard   [ piece of p0 | piece of p1 ]                     always; the pieces are p.data
    whole   [ p0              | p1      | padding ]           while the unit computes; its memory is freed in between

All whole tensors are views of one storage, and the shard is one part of it, so an all-gather fills them all without a
copy, and freeing is one call. Autograd keeps the whole tensors themselves (for backward), never a copy; when the
storage is filled again before backward, what it kept is there again.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import (
    Group,
    Pending,
    all_gather_into_async,
    all_reduce_async,
    group_rank,
    group_size,
    new_buffer,
    reduce_scatter_async,
)
from lockstep.comm.ledger import about
from lockstep.parallel.flat import FlatLayout, Piece

Owner = tuple[nn.Module, str]
"""A module and the name under which it has a parameter."""


class ShardUnit:
    """Parameters of one dtype, all trained or all frozen, of one block."""

    def __init__(
        self,
        owners: dict[nn.Parameter, list[Owner]],
        group: Group,
        compute_dtype: torch.dtype | None,
        device: torch.device,
        shard_device: torch.device,
        replicated: bool = False,
        name: str = "",
    ) -> None:
        """`name`: of the block. `owners`: every parameter, and where it stands; a tied one stands in several places.

        `device`: where to compute; `shard_device`: where the shard lies. `replicated`: every rank holds all of it,
        and gradients are all-reduced.
        """
        self.group, self.owners, self.replicated, self.name = group, owners, replicated, name
        self.parameters = list(owners)
        self.size = 1 if replicated else group_size(group)
        self.rank = 0 if replicated else group_rank(group)
        like = self.parameters[0]
        self.master_dtype, self.shapes = like.dtype, [p.shape for p in self.parameters]
        self.dtype = compute_dtype if compute_dtype is not None and like.dtype.is_floating_point else like.dtype
        self.layout = FlatLayout(self.parameters, self.size, self.dtype.itemsize)
        self.pieces: dict[int, Piece] = {piece.index: piece for piece in self.layout.pieces(self.rank)}
        self.trainable = [i for i, p in enumerate(self.parameters) if p.requires_grad]
        self.device = device
        self.shard = self._make_shard(shard_device)
        self.always_whole = replicated and (self.dtype, device) == (self.shard.dtype, shard_device)
        """The parameters compute themselves: there is nothing to gather or to free."""
        self._make_bodies()
        self.gathering: Pending | None = None
        self.gathered = False
        self.used = [False] * len(self.parameters)
        """By this rank, since the gradients were last zeroed."""
        self.reduced = False
        """In this round: since `finish_gradient_synchronization` was last called."""
        self.gradient: Tensor | None = None
        """This rank's part of the mean gradient, in the master's dtype."""
        self._summing = False
        self._reducing: Pending | None = None
        self._arriving: Tensor | None = None
        self.free()

    def _make_bodies(self) -> None:
        if self.always_whole:
            self.bodies = self.parameters
            return
        self.whole = torch.empty(self.layout.length, dtype=self.dtype, device=self.device)
        views = zip(self.layout.views(self.whole), self.parameters, strict=True)
        self.bodies = [nn.Parameter(view, parameter.requires_grad) for view, parameter in views]
        # Written to through an alias: autograd must not take filling the memory again for a change of the weights.
        self._memory = self.whole.data
        self._storage = self.whole.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._gathered_version = -1

    @torch.no_grad()
    def _make_shard(self, device: torch.device) -> Tensor:
        """This rank's part, in memory that the backend need not copy; each parameter's data become its piece.

        A parameter on the meta device has no data yet: its piece stays empty until somebody fills it.
        """
        length = self.layout.part_length
        if self.replicated:
            shard = torch.zeros(length, dtype=self.master_dtype, device=device)
        else:
            shard = new_buffer(length, self.master_dtype, device, self.group)
        for index, parameter in enumerate(self.parameters):
            piece = self.pieces.get(index)
            if piece is not None and parameter.device.type != "meta":
                shard[piece.at] = parameter.detach().reshape(-1)[piece.inside]
        for index, parameter in enumerate(self.parameters):
            piece = self.pieces.get(index)
            mine = shard[piece.at] if piece is not None else shard[:0]
            if parameter.device.type == "meta":
                replace_meta(parameter, mine, self.owners[parameter])
            parameter.data = mine.view(self.shapes[index]) if self.replicated else mine
        return shard

    # ---- parameters: gather, use, free -----------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> None:
        """Begin to fetch everybody's pieces; nothing if that has begun."""
        if self.gathered or self.gathering is not None or self.always_whole:
            return
        self._gathered_version = self._version()
        self._storage.resize_(self._nbytes)
        if self.size == 1:
            self._memory.copy_(self.shard)
            self.gathering = Pending(None)
            return
        part = self.shard
        if (part.dtype, part.device) != (self.dtype, self.device):
            part = self.layout.part(self._memory, self.rank).copy_(self.shard, non_blocking=True)
        with about(self.name):
            self.gathering = all_gather_into_async(self._memory, part, self.group, purpose="parameters")

    def _version(self) -> int:
        """Grows whenever an optimizer writes to the pieces."""
        return sum(parameter._version for parameter in self.parameters)

    def use(self) -> None:
        """Wait for the gather; the modules compute with whole tensors from here on."""
        if (self.gathered or self.gathering is not None) and self._gathered_version != self._version():
            self.free()  # gathered for a forward that was not followed by a backward, and stepped since
        self.gather()
        if not self.gathered and not self.always_whole:
            assert self.gathering is not None
            self.gathering.wait()
            self.gathering, self.gathered = None, True
            self._place(self.bodies)

    def free(self) -> None:
        """The modules have their pieces again, and the whole tensors no memory."""
        if self.always_whole:
            return
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
        self.gathered = False
        self._place(self.parameters)
        self._storage.resize_(0)

    @torch.no_grad()
    def keep_own_piece(self) -> None:
        """The whole tensors have been written to: the shard becomes this rank's part of them."""
        if not self.always_whole:
            self.shard.copy_(self.layout.part(self._memory, self.rank))

    def _place(self, bodies: Iterable[nn.Parameter]) -> None:
        for body, places in zip(bodies, self.owners.values(), strict=True):
            for module, name in places:
                module._parameters[name] = body

    # ---- gradients: reduce, keep -----------------------------------------------------------------------------

    def has_gradients(self) -> bool:
        """Whole ones, that have not been averaged."""
        return any(self.bodies[i].grad is not None for i in self.trainable)

    def _begin_sum(self) -> bool:
        """Whether an earlier mean waits for this one to be added: not handed over yet, or not zeroed since.

        What has been zeroed since, all of it or a part, does not come back. Where the parameters compute themselves,
        backward has added to what was handed over already.
        """
        if self._summing:
            return True
        kept = [i for i in self.trainable if self.parameters[i].grad is not None]
        if self.always_whole or not kept or self.gradient is None:
            self.used = [False] * len(self.parameters)
            return False
        for index in self.trainable:
            if index not in kept:
                self.used[index] = False
                if index in self.pieces:
                    self.gradient[self.pieces[index].at] = 0
        return True

    @torch.no_grad()
    def reduce(self, buffer: Tensor) -> None:
        """Lay the whole gradients end to end, divided by the number of ranks, and begin to average them."""
        self.finish_reduce()
        adding = self._begin_sum()
        buffer = buffer[: self.layout.length]
        scale = 1.0 / group_size(self.group)
        for index, view in enumerate(self.layout.views(buffer)):
            gradient = self.bodies[index].grad
            if gradient is None:
                view.zero_()
                continue
            torch.mul(gradient.detach(), scale, out=view)
            self.bodies[index].grad = None
            self.used[index] = True
        self.reduced = True
        self._arriving = buffer if self.replicated else self._place_of_mean(adding)
        with about(self.name):
            if self.replicated:
                self._reducing = all_reduce_async(buffer, group=self.group, purpose="gradients")
            else:
                self._reducing = reduce_scatter_async(self._arriving, buffer, group=self.group, purpose="gradients")
        self._summing = adding

    def _place_of_mean(self, adding: bool) -> Tensor:
        """Where this rank's part of the mean is to arrive: where it stays, if it can."""
        if adding or (self.dtype, self.device) != (self.shard.dtype, self.shard.device):
            return torch.empty(self.layout.part_length, dtype=self.dtype, device=self.device)
        if self.gradient is None:
            self.gradient = torch.empty_like(self.shard)
        return self.gradient

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for the mean, and add it to what there is already."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        assert self._arriving is not None
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.shard)
        if self._arriving is not self.gradient:
            if self._summing:
                self.gradient.add_(self._arriving.to(self.gradient))
            else:
                self.gradient.copy_(self._arriving)
        self._arriving = None
        self._summing = True

    def hand_over(self, used: list[bool]) -> None:
        """Give each parameter its piece of the mean; what no rank used keeps None."""
        for index in self.trainable:
            parameter, piece = self.parameters[index], self.pieces.get(index)
            if not used[index] or self.gradient is None:
                parameter.grad = None
            else:
                mine = self.gradient[piece.at] if piece is not None else self.gradient[:0]
                parameter.grad = mine.view(parameter.shape)
        self._summing = self.reduced = False

    def whole_masters(self) -> list[Tensor]:
        """Every parameter whole, in the master's dtype. Every rank must call it."""
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
        self.gradient, self._summing, self.reduced = None, False, False
        for body, parameter in zip(self.bodies, self.parameters, strict=True):
            body.grad = parameter.grad = None


def replace_meta(parameter: nn.Parameter, data: Tensor, places: list[Owner]) -> None:
    """Give a parameter of the meta device a body, without changing which object it is."""
    with torch.no_grad():
        real = nn.Parameter(data, parameter.requires_grad)
    torch.utils.swap_tensors(parameter, real)
    for module, name in places:
        module._parameters[name] = parameter
