"""`lockstep.save` and `lockstep.load`: the state of a user's loop, under any of the wrappers, complete or not at all.

What a rank holds of the model and of the optimizer's state is said by regions (`layout/region.py`), so what one wrapper
has saved at some number of ranks any other loads at another.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.checkpoint.checkpoints import Checkpoints, load_checkpoint
from lockstep.checkpoint.manifest import MANIFEST
from lockstep.comm.collectives import all_gather_objects
from lockstep.errors import UserError
from lockstep.layout import Held
from lockstep.layout.group import group_of, shared_group
from lockstep.layout.world import World
from lockstep.parallel import Pipeline, ShardedOptimizer
from lockstep.parallel.holding import held_by, unwrapped
from lockstep.strategies.state import RegionState, initialize_state


def save(
    folder: str | Path,
    model: nn.Module | Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    step: int = 0,
    keep_last: int = 3,
) -> None:
    """Save what the next step depends on, to `folder/step-...`: weights, the optimizer's state, its rates and other
    settings. Every rank must call it, with a folder that all see.

        lockstep.save("checkpoints", model, optimizer, step=100)

    `model`: plain, cut by `tensor_parallel`, or in a wrapper: ours, PyTorch's DDP or FSDP2. The older ones but for
    `keep_last` are removed when this one is on the disk; 0 keeps all.
    """
    if step < 0:
        raise UserError(f"step is {step}, but it must be 0 or more")
    world, group = here()
    checkpoints = Checkpoints(world, Path(folder), keep_last, asynchronous=False, group=group)
    loop = UserLoop(model, optimizer, world)
    run = {"step": int(step), "groups": settings_of(loop.local_optimizer) if optimizer is not None else []}
    checkpoints.save(loop, run, wait=True)
    if checkpoints.failed is not None:
        raise UserError(f"{folder}: the checkpoint of step {step} was not saved: {checkpoints.failed}")


def load(folder: str | Path, model: nn.Module | Pipeline, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Fill a model and an optimizer from the newest whole checkpoint of `folder`, or from the one that it is.

        start = lockstep.load("checkpoints", model, optimizer)

    Returns its step; 0 where nothing has been saved yet. Every rank must call it.
    """
    world, group = here()
    source = Path(folder)
    one = source if (source / MANIFEST).exists() else None
    found, damage = Checkpoints(world, source.parent if one is not None else source, group=group).find(one)
    if found is None:
        if damage:
            raise UserError(f"{folder} has no whole checkpoint: {damage[0]}")
        return 0
    loop = UserLoop(model, optimizer, world)
    check_fits(found, loop, optimizer is not None)
    run = load_checkpoint(found, loop, world, group)
    saved = run.get("groups")
    if optimizer is not None and isinstance(saved, list) and len(saved) == len(loop.local_optimizer.param_groups):
        for group_, settings in zip(loop.local_optimizer.param_groups, saved, strict=True):
            known = {key: value for key, value in dict(settings).items() if key in group_ and key != "params"}
            group_.update({key: tuple(v) if isinstance(v, list) else v for key, v in known.items()})
    return int(run["step"])


def here() -> tuple[World, dist.ProcessGroup | None]:
    """Where this process stands, and a group whose messages no step's wait for."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World(), None
    world = World(dist.get_rank(), dist.get_world_size())
    return world, shared_group(range(world.size), "gloo", lane="checkpoints")


class UserLoop:
    """A model and its optimizer, as `RegionState` asks an engine about them."""

    loss_scale = None
    waits_for_copies = False

    def __init__(self, model: nn.Module | Pipeline, optimizer: torch.optim.Optimizer | None, world: World) -> None:
        self.wrapper, self.optimizer = model, optimizer or no_optimizer()
        self.sharded = optimizer if isinstance(optimizer, ShardedOptimizer) else None
        """The same, where it has this rank's pieces only."""
        self.model = unwrapped(model)
        group = group_of()
        self.layout = SimpleNamespace(world=world, batch=group, norm=group)
        self.options = SimpleNamespace(save_trained_only=False)
        self.state = RegionState(self)

    def held(self) -> dict[str, Held]:
        if self.sharded is not None:
            self.sharded.wait_for_parameters()
        return held_by(self.wrapper)

    def trained(self) -> dict[str, Held]:
        if self.sharded is not None:
            return self.sharded.owned_of(self.model)
        return {name: held for name, held in self.held().items() if held.parameter.requires_grad}

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer if self.sharded is None else self.sharded.inner

    def after_load(self) -> None:
        if self.sharded is not None:
            self.sharded.refresh()

    def optimizer_waits_for(self, copied: torch.cuda.Event) -> None:
        """Its optimizer is the user's."""
        copied.synchronize()

    def local_state(self) -> dict[str, Any]:
        return {}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """There is none."""


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group of parameters: its rate, momentum, weight decay, as a schedule has left them."""
    numbers = (bool, int, float, str, type(None))
    return [
        {key: value for key, value in group.items() if isinstance(value, numbers) or key == "betas"}
        for group in optimizer.param_groups
    ]


def check_fits(found: Path, loop: "UserLoop", with_optimizer: bool) -> None:
    """Refuse what would be left out in silence: a part of the model, or the optimizer's whole state."""
    from lockstep.checkpoint.storage import saved_names  # slow to import

    theirs = saved_names(found)
    initialize_state(loop.local_optimizer)
    mine = {name for part in all_gather_objects(set(loop.state.state_dict()), loop.layout.norm) for name in part}
    surplus = sorted(name for name in theirs - mine if name.startswith("model."))
    if surplus:
        raise UserError(f"{found} has {surplus[0]} (and {len(surplus) - 1} more), which this model has not")
    has_state = any(name.startswith("optimizer.") for name in mine)
    if with_optimizer and has_state and not any(name.startswith("optimizer.") for name in theirs):
        raise UserError(f"{found} was saved without the optimizer's state; load it without the optimizer")


def no_optimizer() -> torch.optim.Optimizer:
    """For a model alone: of no parameter, so that it has no state."""
    return torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.0)
