"""Some of the ranks as a world of their own."""

from dataclasses import replace

import torch.distributed as dist

from lockstep.errors import UserError
from lockstep.launch.join import check_backend
from lockstep.layout.world import World, torch_backend


def part_of(world: World, ranks: int | None = None, backend: str = "") -> World | None:
    """The first `ranks` ranks as a world of their own, perhaps joined by another backend; None on the others.

    Every rank must call it.
    """
    ranks = world.size if ranks is None else ranks
    if ranks > world.size:
        raise UserError(f"{ranks} ranks are asked for, and {world.size} have been started")
    same_backend = backend in ("", world.backend)
    if world.size == 1 or (ranks == world.size and same_backend):
        return world
    chosen = backend or world.backend
    check_backend(chosen, world.device, "--strategies: the backend")
    group = dist.new_group(list(range(ranks)), backend=torch_backend(chosen))
    if world.rank >= ranks:
        return None
    return replace(world, size=ranks, backend=chosen, group=group, ranks_on_device=sharing(world, ranks))


def sharing(world: World, ranks: int) -> int:
    """How many of the first `ranks` ranks have one device, at most: ranks take the devices in turn."""
    devices = -(-world.size // world.ranks_on_device)
    return -(-ranks // devices)
