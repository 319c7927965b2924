"""`lockstep.save` and `lockstep.load`: the state of anybody's own loop, under any of the wrappers, whole or not at all.

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
from lockstep.errors import UserError
from lockstep.layout import Held
from lockstep.layout.group import group_of, shared_group
from lockstep.layout.region import region_of
from lockstep.layout.world import World
from lockstep.parallel import FullyShardedDataParallel, Pipeline, ShardedOptimizer
from lockstep.strategies.sharded import owned_region
from lockstep.strategies.state import RegionState


def save(
    folder: str | Path,
    model: nn.Module | Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    step: int = 0,
    keep_last: int = 3,
) -> None:
    """Save what the next step depends on, to `folder/step-...`. Every rank must call it, with a folder that all see.

        lockstep.save("checkpoints", model, optimizer, step=100)

    `model`: plain, cut by `tensor_parallel`, or in a wrapper: ours, PyTorch's DDP or FSDP2. The older ones but for
    `keep_last` are removed when this one is on the disk; 0 keeps all.
    """
    world, group = here()
    checkpoints = Checkpoints(world, Path(folder), keep_last, asynchronous=False, group=group)
    checkpoints.save(OwnLoop(model, optimizer, world), {"step": int(step)}, wait=True)  # type: ignore[arg-type]
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
    run = load_checkpoint(found, OwnLoop(model, optimizer, world), world, group)  # type: ignore[arg-type]
    return int(run["step"])


def here() -> tuple[World, dist.ProcessGroup | None]:
    """Where this process stands, and a group whose messages no step's wait for."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World(), None
    world = World(dist.get_rank(), dist.get_world_size())
    return world, shared_group(range(world.size), "gloo", lane="checkpoints")


class OwnLoop:
    """A model and its optimizer, as `RegionState` asks an engine about them."""

    loss_scale = None

    def __init__(self, model: nn.Module | Pipeline, optimizer: torch.optim.Optimizer | None, world: World) -> None:
        self.wrapper, self.optimizer = model, optimizer or no_optimizer()
        self.model: nn.Module = model.stage if isinstance(model, Pipeline) else getattr(model, "module", model)
        group = group_of()
        self.layout = SimpleNamespace(world=world, batch=group, norm=group)
        self.options = SimpleNamespace(save_trained_only=False)
        self.state = RegionState(self)  # type: ignore[arg-type]

    def held(self) -> dict[str, Held]:
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.wait_for_parameters()
        if isinstance(self.wrapper, FullyShardedDataParallel):
            return {name: Held(parameter, region) for name, parameter, region in self.wrapper.held()}
        return {name: Held(p, region_of(p)) for name, p in self.model.named_parameters()}

    def trained(self) -> dict[str, Held]:
        if not isinstance(self.optimizer, ShardedOptimizer):
            return {name: held for name, held in self.held().items() if held.parameter.requires_grad}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        owned = [one for one in self.optimizer.owned() if one.parameter in names]
        return {names[one.parameter]: Held(one.shard, owned_region(one)) for one in owned}

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.inner if isinstance(self.optimizer, ShardedOptimizer) else self.optimizer

    def after_load(self) -> None:
        if isinstance(self.optimizer, ShardedOptimizer):
            for bucket in self.optimizer.buckets:
                bucket.refresh()

    def own_state(self) -> dict[str, Any]:
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """There is none."""


def no_optimizer() -> torch.optim.Optimizer:
    """For a model alone: of no parameter, so that it has no state."""
    return torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.0)
