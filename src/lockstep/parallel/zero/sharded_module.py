"""A sharded module: which parameter belongs to which unit, how units are initialized, and whole tensors by name.

    block   a module that is unsharded, used and resharded as one (by default, one of the model's blocks)
    unit    its parameters of one dtype, trained and frozen apart, end to end in one buffer (`shard_unit.py`)
    rest    units of what lies outside every block, or in two of them: every rank holds all of it

`fully_sharded.py` and `sharded_stage.py` (for pipelines) say when which unit is gathered and reduced.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from lockstep.comm.collectives import broadcast
from lockstep.errors import UserError
from lockstep.layout.group import Group, replicas_of
from lockstep.layout.region import Held
from lockstep.models.blocks import ShardBy, chosen_blocks
from lockstep.parallel.data.wrapper import Flags, GradientWrapper, broadcast_buffers, broadcast_tensor, check_same_model
from lockstep.parallel.guards import mark_spread
from lockstep.parallel.zero.gradient_buffers import GradientBuffers
from lockstep.parallel.zero.shard_unit import Owner, ShardUnit, UnitPlacement, UnitState

CPU = torch.device("cpu")
OUTSIDE = "outside the blocks"
BATCH_NORM = nn.modules.batchnorm._BatchNorm
Initialize = Callable[[nn.Module], None]


def fill_later(module: nn.Module) -> None:
    """Given as `initialize`: parameters on the meta device stay empty until `load_full_state_dict`."""


class ShardedBlock:
    """A module whose parameters are gathered together: its units (one per dtype, trained and frozen apart)."""

    def __init__(self, module: nn.Module, units: list[ShardUnit], is_root: bool) -> None:
        self.module, self.units, self.is_root = module, units, is_root
        self.was_whole = False
        """Whether it was unsharded already before its forward began."""

    def prefetch(self) -> None:
        for unit in self.units:
            unit.prefetch()

    def unshard(self) -> None:
        for unit in self.units:
            unit.unshard()

    def reshard(self) -> None:
        for unit in self.units:
            unit.reshard()


class ShardedModule(GradientWrapper):
    """Holds a module whose parameters are this rank's pieces."""

    def __init__(
        self,
        module: nn.Module,
        shard: ShardBy | None,
        group: Group,
        placement: UnitPlacement,
        initialize: Initialize | None,
        manual: bool,
    ) -> None:
        super().__init__(module, group, manual)
        self.placement = placement
        check_same_model(module, group)
        self.blocks: list[ShardedBlock] = []
        self.rest: list[ShardUnit] = []
        self._make_units(shard, initialize or reset_parameters)
        if group.size > 1:
            mark_spread((p for unit in self.units() for p in unit.parameters), "FullyShardedDataParallel", True)
        for submodule in module.modules():
            self._give_buffers(submodule)
        broadcast_buffers(module, group)
        self._in_blocks = {unit for block in self.blocks if not block.is_root for unit in block.units}
        self._gradient_buffers = GradientBuffers(placement.device, group)
        self.make_gradient_buffers()

    def _make_units(self, shard: ShardBy | None, initialize: Initialize) -> None:
        chosen = dict(chosen_blocks(self.module, shard))
        places, homes = self._homes(chosen)
        for name, module in chosen.items():
            mine = {p: places[p] for p in places if homes[p] == {name}}
            units = self._units(mine, name or OUTSIDE, replicated=False, initialize=initialize)
            if units:
                self.blocks.append(ShardedBlock(module, units, is_root=module is self.module))
        outside = {p: places[p] for p in places if len(homes[p]) > 1 or homes[p] == {None}}
        self.rest = self._units(outside, OUTSIDE, replicated=True, initialize=initialize)

    def _homes(
        self, chosen: dict[str, nn.Module]
    ) -> tuple[dict[nn.Parameter, list[Owner]], dict[nn.Parameter, set[str | None]]]:
        """For every parameter: all its places, and the innermost chosen modules that contain them."""
        places: dict[nn.Parameter, list[Owner]] = {}
        homes: dict[nn.Parameter, set[str | None]] = {}
        for path, module in self.module.named_modules(remove_duplicate=False):
            around = [n for n in chosen if n == path or n == "" or path.startswith(n + ".")]
            home = max(around, key=len, default=None)
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                homes.setdefault(parameter, set()).add(home)  # a module that stands in two blocks has two
                if (module, name) not in places.setdefault(parameter, []):
                    places[parameter].append((module, name))
        return places, homes

    def _units(
        self, owners: dict[nn.Parameter, list[Owner]], name: str, replicated: bool, initialize: Initialize
    ) -> list[ShardUnit]:
        """One for each dtype and group of ranks with copies, trained and frozen apart. Batch norms compute in fp32, as
        their statistics do.
        """
        alike: dict[tuple[torch.dtype, torch.dtype | None, bool, Group], dict[nn.Parameter, list[Owner]]] = {}
        for parameter, places in owners.items():
            dtype = None if all(isinstance(m, BATCH_NORM) for m, _ in places) else self.placement.compute_dtype
            kind = (parameter.dtype, dtype, parameter.requires_grad, replicas_of(parameter, self.group))
            alike.setdefault(kind, {})[parameter] = places
        empty = [module for p, places in owners.items() if p.device.type == "meta" for module, _ in places]
        for parameter in owners:
            if parameter.device.type != "meta":
                broadcast_tensor(parameter, replicas_of(parameter, self.group))
        units = [
            ShardUnit(owned, own, replace(self.placement, compute_dtype=dtype), replicated or own.size == 1, name)
            for (_, dtype, _, own), owned in alike.items()
        ]
        if empty and initialize is not fill_later:
            self._initialize(units, list(dict.fromkeys(empty)), initialize)
        return units

    @torch.no_grad()
    def _initialize(self, units: list[ShardUnit], empty: list[nn.Module], initialize: Initialize) -> None:
        """Initialize parameters from the meta device: unsharded first, then each rank keeps its piece of rank 0's."""
        for unit in units:
            unit.unshard()
        for module in empty:
            self._give_buffers(module)
            initialize(module)
        for unit in units:
            for parameter in unit.unsharded:
                broadcast(parameter.data, group=unit.group, purpose="parameters")
            unit.keep_local_piece()
            unit.reshard()

    def _give_buffers(self, module: nn.Module) -> None:
        """Move buffers to the compute device; those on the meta device have no values to keep."""
        for key, buffer in module._buffers.items():
            if buffer is not None:
                on_meta, device = buffer.device.type == "meta", self.placement.device
                module._buffers[key] = torch.zeros_like(buffer, device=device) if on_meta else buffer.to(device)

    def units(self) -> list[ShardUnit]:
        return [*(unit for block in self.blocks for unit in block.units), *self.rest]

    def trained_units(self) -> list[ShardUnit]:
        return [unit for unit in self.units() if unit.trainable]

    def outside(self) -> list[ShardUnit]:
        """The units outside the blocks, which stay unsharded from forward to backward."""
        return [*(unit for block in self.blocks if block.is_root for unit in block.units), *self.rest]

    @contextmanager
    def outside_unsharded(self) -> Iterator[None]:
        """Around a forward. What it gathers stays for backward; if there is none it is released, unless the backward of
        an earlier forward needs it.
        """
        outside = self.outside()
        was_whole = [unit.state is UnitState.UNSHARDED for unit in outside]
        for unit in outside:
            unit.unshard()
        yield
        for unit, before in zip(outside, was_whole, strict=True):
            if not torch.is_grad_enabled() and not before and not self.stays_unsharded:
                unit.reshard()

    @property
    def stays_unsharded(self) -> bool:
        """What is gathered serves passes that follow."""
        return False

    def follow_freezing(self) -> None:
        """Between two steps the user may have frozen parameters, or unfrozen them."""
        for unit in self.units():
            unit.follow_freezing()
        self.make_gradient_buffers()

    def cast(self, values: Any, dtype: torch.dtype | None) -> Any:
        """Cast every floating-point tensor among the values to `dtype`, if one is given."""
        if dtype is None:
            return values
        flat, shape = tree_flatten(values)
        floats = (isinstance(v, Tensor) and v.is_floating_point() for v in flat)
        return tree_unflatten([v.to(dtype) if so else v for v, so in zip(flat, floats, strict=True)], shape)

    # ---- reductions ------------------------------------------------------------------------------------------

    def make_gradient_buffers(self) -> None:
        """Unless those that there are serve all units that train."""
        self._gradient_buffers.make_for([u for u in self.trained_units() if not u.is_local], self._in_blocks)

    def reduce(self, unit: ShardUnit) -> None:
        """Issue it."""
        if unit.is_local:
            unit.reduced = True
        else:
            unit.issue_reduce(self._gradient_buffers.take(unit))

    def reduction_order(self) -> list[ShardUnit]:
        """The order, the same on all ranks, in which units that backward has not reduced are reduced."""
        return self.trained_units()[::-1]

    def close_round(self) -> None:
        """Give every rank its pieces of the mean, added to those of earlier rounds since `zero_grad`.

        Reductions issued during backward are waited for, the rest are issued now: units whose inputs need no gradient,
        and those that no loss depends on. A unit that computed after it was reduced (re-entrant checkpointing) has late
        gradients: while any rank has late gradients, all ranks do another round.
        """
        units = self.trained_units()
        late = True
        while late:
            for unit in self.reduction_order():
                if not unit.reduced:
                    self.reduce(unit)
            late_here = any(unit.has_gradients() for unit in units)
            used_here = [used for unit in units for used in unit.used]
            flags = Flags(used_here, late_here, self.placement.device, self.group)
            for unit in units:
                unit.finish_reduce()
                unit.reduced = False
            used, late = flags.read()
        position = 0
        for unit in units:
            unit.hand_over(used[position : position + len(unit.used)])
            position += len(unit.used)

    # ---- what is held ----------------------------------------------------------------------------------------

    def gradient_buffers(self) -> list[Tensor]:
        """The buffers in which unsharded gradients are reduced, two of each dtype in turn."""
        return self._gradient_buffers.tensors()

    def gathered_bytes(self) -> int:
        """Memory of the units' unsharded parameters at this moment."""
        return sum(unit.gathered_bytes for unit in self.units())

    def gathered_sizes(self) -> tuple[int, list[int]]:
        """Bytes of unsharded parameters: outside the blocks, and of each block."""
        blocks = [sum(unit.unsharded_bytes for unit in b.units) for b in self.blocks if not b.is_root]
        return sum(unit.unsharded_bytes for unit in self.outside()), blocks

    def unfilled_copy(self, memo: dict[int, Any], hooks: Iterable[RemovableHandle]) -> nn.Module:
        """The module without its weights (on the meta device) and without these hooks, for a wrapper of its own."""
        for unit in self.units():
            unit.reshard()
            for parameter, shape, region in zip(unit.parameters, unit.shapes, unit.regions, strict=True):
                empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
                copied: Any = nn.Parameter(empty, parameter.requires_grad)
                copied.region = region
                memo[id(parameter)] = copied
        module = copy.deepcopy(self.module, memo)
        for part in module.modules():
            for hook in hooks:
                part._forward_pre_hooks.pop(hook.id, None)
                part._forward_pre_hooks_with_kwargs.pop(hook.id, None)
                part._forward_hooks.pop(hook.id, None)
        return module

    # ---- the whole of it, by name ----------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """With the module's own names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    @torch.no_grad()
    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of every parameter, in the master's dtype; tied ones come under each of their names.

        Every rank must iterate over all of it. Only one unit is unsharded at a time: copy what you keep.
        """
        names = self._names()
        for unit in self.units():
            for parameter, whole in zip(unit.parameters, unit.whole_masters(), strict=True):
                yield from ((name, whole) for name in names[parameter])

    @torch.no_grad()
    def full_state_dict(self, only_rank: int | None = None) -> dict[str, Tensor]:
        """The module's state_dict, as if it were not sharded; on every rank, or on the host of one only.

        A rank that keeps nothing needs memory for its share and one unit.
        """
        keep = only_rank is None or self.group.rank == only_rank
        found: dict[str, Tensor] = {}
        for name, whole in self.whole_parameters():
            if keep:
                found[name] = whole.clone() if only_rank is None else whole.to(CPU, copy=True)
        if not keep:
            return {}
        place = None if only_rank is None else CPU
        state = self.module.state_dict()
        return {n: found[n] if n in found else v.detach().to(place, copy=True) for n, v in state.items()}

    def unreduced_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """This rank's unreduced gradients by name, as `no_sync` has left them."""
        names = self._names()
        for unit in self.trained_units():
            for index in unit.trainable:
                yield names[unit.parameters[index]][0], unit.unreduced.get(index)

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients by name, of the parameters that have one. For looking at: training never needs them."""
        names, found = self._names(), {}
        for unit in self.trained_units():
            gradients = unit.whole_gradients()
            for index in unit.trainable:
                if unit.parameters[index].grad is not None:
                    found[names[unit.parameters[index]][0]] = gradients[index]
        return found

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Load whole tensors by name: this rank copies its pieces. An iterator may give them one at a time."""
        held = self.held()
        tied = {name: names[0] for names in self._names().values() for name in names}
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        for name, whole in state.items() if isinstance(state, Mapping) else state:
            if name in buffers:
                buffers[name].copy_(whole)
            elif name in tied:
                mine = held[tied[name]]
                if tuple(whole.shape) != mine.region.shape:
                    raise UserError(f"{name} has shape {tuple(whole.shape)}, and the model's has {mine.region.shape}")
                mine.parameter.view(-1).copy_(mine.region.read(whole))
            else:
                raise UserError(f"{name} is no parameter or buffer of the module")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused where ranks have pieces only: a file of them would be useless."""
        if self.group.size == 1:
            return self.full_state_dict()
        raise UserError(
            f"state_dict() would hold 1/{self.group.size} of every tensor; call full_state_dict() on every rank "
            f"(only_rank=0: the others get nothing), and load_full_state_dict() to load it"
        )

    def held(self) -> dict[str, Held]:
        """Every parameter under its first name, and what this rank holds of it."""
        names = self._names()
        return {
            names[parameter][0]: Held(parameter, unit.region(index))
            for unit in self.units()
            for index, parameter in enumerate(unit.parameters)
        }

    def _names(self) -> dict[nn.Parameter, list[str]]:
        """The names of every parameter, whether it is sharded or unsharded at the moment."""
        names: dict[nn.Parameter, list[str]] = {}
        places = {place: p for unit in self.units() for p, owners in unit.owners.items() for place in owners}
        for path, module in self.module.named_modules(remove_duplicate=False):
            for name in module._parameters:
                if (module, name) in places:
                    names.setdefault(places[module, name], []).append(f"{path}.{name}" if path else name)
        return names


def reset_parameters(module: nn.Module) -> None:
    """PyTorch's own way of filling a module's parameters."""
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise UserError(
            f"{type(module).__name__} is on the meta device and has no reset_parameters; give initialize=, a function "
            f"that fills one module's own parameters"
        )
    reset()
