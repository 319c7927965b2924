"""ZeRO stage 1 by hand: every rank keeps, and updates, only its part of the optimizer's state.

How a step goes:

1. parameters live in flat buckets, cut into n equal parts; each rank owns one part of every bucket
2. the wrapped optimizer knows this rank's pieces only: 1-D views of the parameters, with the matching slice of
   `p.grad`. It steps them in place, so Adam's two moments exist once over all ranks
3. each bucket is all-gathered in place: every rank gets the parts that the others have updated. `step()` waits for
   that, unless the caller waits before the parameters are used (`overlap_gather`): then the all-gathers
   are in flight while the next forward pass begins, those of the first layers first

It does not average gradients: it steps with what is in `p.grad`, as any optimizer does. `DataParallel`
averages them on all ranks (2Ψ bytes, and Ψ for the parameters); `ShardedDataParallel` gives each rank only its own
part of the mean (Ψ and Ψ), which is the ZeRO of the paper.

Cutting through tensors is right for optimizers that treat each element by itself (SGD, Adam, AdamW, RMSprop, ...).
Those that look at a whole matrix or at all parameters are refused.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_into_async, all_gather_objects, new_buffer
from lockstep.comm.ledger import about, awaited_later
from lockstep.comm.pending import Pending
from lockstep.errors import UserError
from lockstep.layout.group import Group, GroupLike, group_of, replicas_of
from lockstep.layout.region import Held, Region, region_of
from lockstep.models.matrices import matrices_in
from lockstep.parallel.data.bucket import assign_buckets
from lockstep.parallel.data.law import FIRST_BUCKET_SHARE
from lockstep.parallel.guards import mark_spread, needs_whole_tensors
from lockstep.parallel.optimizer.muon import Muon
from lockstep.parallel.optimizer.step import loss_of, parameters_of
from lockstep.parallel.zero.flat import FlatLayout, Piece

MIB = 1024 * 1024


class ParameterBucket:
    """Parameters in one flat buffer, of which this rank owns a part."""

    def __init__(self, parameters: list[nn.Parameter], group: Group, offload: bool) -> None:
        self.parameters, self.group, self.offload = parameters, group, offload and parameters[0].device.type != "cpu"
        self.layout = FlatLayout(parameters, group.size)
        like = parameters[0]
        self.flat = new_buffer(self.layout.length, like.dtype, like.device, group)
        for parameter, view in zip(parameters, self.layout.fill(self.flat, parameters), strict=True):
            parameter.data = view
        self.own = self.layout.part(self.flat, group.rank)
        self.pieces = self.layout.pieces(group.rank)
        place = torch.device("cpu") if self.offload else like.device
        self.shards = [nn.Parameter(self.own[piece.at].to(place)) for piece in self.pieces]
        """What the optimizer steps: this rank's pieces, in the parameters' own memory, or in the host's."""

        self._gathering: Pending | None = None

    def issue_gather(self) -> None:
        """Fetch the parts that other ranks have updated; `wait` before the parameters are used."""
        self._gathering = all_gather_into_async(self.flat, self.own, self.group, purpose="parameters")

    def wait(self) -> None:
        """Wait until the parameters are complete."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def take_gradients(self) -> list[nn.Parameter]:
        """Give each piece its slice of `p.grad`, where there is one; else it keeps the gradient that a wrapper has set.

        Returns the pieces that were given a gradient, which is for this step only.
        """
        taken = []
        for piece, shard in zip(self.pieces, self.shards, strict=True):
            gradient = self.parameters[piece.index].grad
            if gradient is not None:
                shard.grad = gradient.detach().reshape(-1)[piece.inside].to(shard.device)
                taken.append(shard)
        return taken

    def refresh(self) -> None:
        """The parameters have been written to: offloaded pieces, which are copies, take the new values."""
        if self.offload:
            for piece, shard in zip(self.pieces, self.shards, strict=True):
                shard.data.copy_(self.own[piece.at])

    def put_back(self) -> None:
        """Offloaded pieces have been stepped on the host: copy them back into the parameters."""
        if self.offload:
            for piece, shard in zip(self.pieces, self.shards, strict=True):
                self.own[piece.at].copy_(shard, non_blocking=True)


@dataclass
class OwnedPiece:
    """This rank's piece of one parameter, for saving and loading."""

    parameter: nn.Parameter
    piece: Piece
    shard: nn.Parameter

    @property
    def region(self) -> Region:
        """Its region of the model's tensor."""
        return region_of(self.parameter).part(self.piece.inside.start, self.piece.inside.stop)


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is spread over the ranks.

        optimizer = lockstep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        model = lockstep.ShardedDataParallel(model, optimizer, stage=1)

    Each rank updates its part of every bucket, and the ranks gather what the others have updated.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        process_group: GroupLike = None,
        bucket_mb: float = 25.0,
        offload: bool = False,
        **kwargs: Any,
    ) -> None:
        """`offload`: keep this rank's state, and the masters of its pieces, in the host's memory, and step there."""
        self._make, self._options, self._offload = optimizer_cls, kwargs, offload
        self.times_zeroed = 0
        self.overlap_gather = False
        """`step()` returns with all-gathers in flight: a caller that sets this calls `wait_for_parameters` in time."""
        self.gather_order: list[ParameterBucket] = []
        """The order in which forward needs the buckets, if known; else from the last, which has the first layers."""
        self.group, self._cap = group_of(process_group, "shard"), bucket_mb * MIB
        self._inner: torch.optim.Optimizer | None = None
        self._frozen: list[nn.Parameter] = []
        self.buckets: list[ParameterBucket] = []
        super().__init__(params, {})
        self.defaults = self.inner.defaults

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer: it knows this rank's pieces only."""
        assert self._inner is not None
        return self._inner

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard a further group; its options may differ from the first's."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        trainable = [p for p in group["params"] if p.requires_grad]
        self._frozen += [p for p in group["params"] if not p.requires_grad]
        kind = partial(replicas_of, others=self.group)
        grouped = assign_buckets(trainable, self._cap, FIRST_BUCKET_SHARE * self._cap, kind)
        buckets = [ParameterBucket(parameters, kind(parameters[0]), self._offload) for parameters in grouped]
        self.buckets += buckets
        pieces = [shard for bucket in buckets for shard in bucket.shards]
        mark_spread(pieces, "ShardedOptimizer", pieces=True)
        inner_group = {**{k: v for k, v in group.items() if k != "params"}, "params": pieces}
        if self._inner is None:
            self._inner = self._make([inner_group], **self._options)
            if needs_whole_tensors(self._inner):
                raise UserError(
                    f"{type(self._inner).__name__} looks at more than one element at a time, and ShardedOptimizer cuts "
                    f"through tensors; use lockstep.Muon, or an element-wise optimizer (SGD, Adam, AdamW, RMSprop, ...)"
                )
        else:
            self._inner.add_param_group(inner_group)
        for key, value in self._inner.param_groups[-1].items():
            group.setdefault(key, value)

    def assign(self, model: nn.Module) -> "ShardedOptimizer":
        """For `Muon`, which needs to know the model's matrices. `ShardedDataParallel` calls it."""
        assert isinstance(self.inner, Muon), "other optimizers look at elements only"
        owned = self.owned_of(model)
        kinds = matrices_in(model, {name: tuple(p.shape) for name, p in model.named_parameters()})
        self.inner.assign_held(owned, kinds, self.group)
        return self

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's pieces, then all-gather the others'."""
        loss = loss_of(closure)
        if any(p.grad is not None for p in self._frozen):
            raise UserError(
                "a parameter that was frozen when ShardedOptimizer was made has a gradient now; make the optimizer "
                "after unfreezing it"
            )
        self.wait_for_parameters()
        self._copy_options()
        taken = [shard for bucket in self.buckets for shard in bucket.take_gradients()]
        self.inner.step()
        for shard in taken:
            shard.grad = None
        self.gather()
        return loss

    def gather(self) -> None:
        """This rank's pieces have new values: all ranks get them."""
        for bucket in self.buckets:
            bucket.put_back()
        for bucket in self.gather_order or self.buckets[::-1]:
            with about(f"bucket {self.buckets.index(bucket)}"), awaited_later(self.overlap_gather):
                bucket.issue_gather()
        if not self.overlap_gather:
            self.wait_for_parameters()

    def wait_for_parameters(self) -> None:
        """Wait for the parameters that other ranks have updated in the last step."""
        for bucket in reversed(self.buckets):
            bucket.wait()

    def _copy_options(self) -> None:
        """Schedulers write to our groups; the wrapped optimizer reads its own."""
        for ours, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in ours.items() if key != "params"})

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.times_zeroed += 1
        for bucket in self.buckets:
            for shard in bucket.shards:
                shard.grad = None

    # ---- state -----------------------------------------------------------------------------------------------

    def owned(self) -> list[OwnedPiece]:
        """Every piece of this rank."""
        return [
            OwnedPiece(bucket.parameters[piece.index], piece, shard)
            for bucket in self.buckets
            for piece, shard in zip(bucket.pieces, bucket.shards, strict=True)
        ]

    def owned_of(self, module: nn.Module) -> dict[str, Held]:
        """What this rank steps of a module's parameters, by their names."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        return {names[o.parameter]: Held(o.shard, o.region) for o in self.owned() if o.parameter in names}

    def refresh(self) -> None:
        """Parameters have been written to: copy their values into this rank's pieces."""
        for bucket in self.buckets:
            bucket.refresh()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part. Every rank saves its own; it loads at the same number of ranks only."""
        self._copy_options()
        rank, ranks = self.group.rank, self.group.size
        return {"rank": rank, "ranks": ranks, "shard": self.inner.state_dict()}

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """All ranks' parts put together, as the unsharded optimizer would give it; it loads at any number of ranks.

        Every rank must call it, and every rank gets the result.
        """
        if any(bucket.group != self.group for bucket in self.buckets):
            raise UserError(
                "experts are spread over ranks, and no rank has them whole; lockstep.save() saves what each rank holds"
            )
        self._copy_options()
        numbers = {p: i for i, p in enumerate(parameters_of(self))}
        mine: dict[int, list[tuple[slice, dict[str, Any]]]] = {}
        for owned in self.owned():
            if owned.shard in self.inner.state:
                state = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in self.inner.state[owned.shard].items()}
                mine.setdefault(numbers[owned.parameter], []).append((owned.piece.inside, state))
        whole: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(numbers):  # one at a time: the ranks' parts are gathered in small portions
            for part in all_gather_objects(mine.get(number, []), self.group):
                for inside, state in part:
                    put_together(whole.setdefault(number, {}), state, inside, parameter)
        groups, start = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            options = {k: v for k, v in group.items() if k != "params"}
            groups.append({**options, "params": list(range(start, start + count))})
            start += count
        return {"state": whole, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A rank's own part (`state_dict`), or the whole (`full_state_dict`, or the unsharded optimizer's)."""
        if "shard" in state_dict:
            here = (self.group.rank, self.group.size)
            given = (state_dict["rank"], state_dict["ranks"])
            if here != given:
                raise UserError(
                    f"this is the part of rank {given[0]} of {given[1]}, and it is loaded on rank {here[0]} of "
                    f"{here[1]}; save full_state_dict() to move between numbers of ranks"
                )
            self.inner.load_state_dict(state_dict["shard"])
        else:
            self._load_whole(state_dict)
        for ours, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            ours.update({key: value for key, value in inner.items() if key != "params"})

    def _load_whole(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise UserError(
                f"the state has groups of {[len(g['params']) for g in groups]} parameters, and this optimizer of "
                f"{[len(g['params']) for g in self.param_groups]}"
            )
        saved = [number for group in groups for number in group["params"]]
        numbers = dict(zip(parameters_of(self), saved, strict=True))
        pieces = {owned.shard: owned for owned in self.owned()}
        shards = [shard for group in self.inner.param_groups for shard in group["params"]]
        states: dict[int, dict[str, Any]] = {}
        for number, shard in enumerate(shards):
            owned = pieces[shard]
            if (state := state_dict["state"].get(numbers[owned.parameter])) is not None:
                states[number] = {
                    key: cut(key, value, owned.piece.inside, owned.parameter, shard.device)
                    for key, value in state.items()
                }
        inner_groups, start = [], 0
        for inner, given in zip(self.inner.param_groups, groups, strict=True):
            count = len(inner["params"])
            inner_groups.append({**given, "params": list(range(start, start + count))})
            start += count
        # By torch's own way of loading: a fused optimizer counts its steps on the device, others on the host.
        self.inner.load_state_dict({"state": states, "param_groups": inner_groups})


def put_together(whole: dict[str, Any], state: dict[str, Any], inside: slice, parameter: Tensor) -> None:
    """Write a piece's state into the whole parameter's. State without the piece's shape (a step count) is copied."""
    length = inside.stop - inside.start
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() == 1 and len(value) == length:
            whole.setdefault(key, torch.zeros(parameter.shape, dtype=value.dtype, device=parameter.device))
            whole[key].view(-1)[inside] = value.to(parameter.device)
        else:
            whole[key] = value


def cut(key: str, value: Any, inside: slice, parameter: Tensor, device: torch.device) -> Any:
    """A piece's state from the whole parameter's."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step":
        return value.reshape(-1)[inside].to(device, copy=True)
    return value.clone() if isinstance(value, Tensor) else value
