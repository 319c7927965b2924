"""The ranks of a user's loop: `init` joins them, `spawn` starts some on this machine."""

import atexit
import pickle
from collections.abc import Callable
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.launch.adopt import adopt_environment
from lockstep.launch.join import join_world
from lockstep.launch.options import DeviceChoice
from lockstep.launch.start import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.leaving import leave

_joined: list[World] = []


def init(
    backend: str | None = None,
    device: DeviceChoice = "auto",
    seed: int | None = 0,
    share_gpu: bool = False,
    timeout: float = 300.0,
) -> World:
    """Join the other ranks, under torchrun, srun or `lockstep.spawn`; a process by itself is a world of one.

        world = lockstep.init()
        model = model.to(world.device)
        mine = lockstep.shard_batch(inputs, world.rank, world.size)

    `backend`: by default nccl on GPUs, shm on the CPUs of one machine, gloo on those of several. `seed`: of torch's
    random numbers, the same on every rank; None leaves them alone. Asked again, it gives the same world.
    """
    if not _joined:
        adopt_environment()
        joining = join_world(device, backend, share_gpu, timeout)
        _joined.append(joining.__enter__())
        atexit.register(leave, nccl=True)
    if seed is not None:
        torch.manual_seed(seed)
    return _joined[0]


def spawn(
    function: Callable[..., Any],
    *args: Any,
    nproc: int = 2,
    device: DeviceChoice = "auto",
    backend: str | None = None,
    share_gpu: bool = False,
    timeout: float = 300.0,
) -> list[Any]:
    """Run `function(*args)` on `nproc` ranks of this machine; what each of them returned, in rank order.

        if __name__ == "__main__":
            lockstep.spawn(train, nproc=4)

    In there `lockstep.init()` gives the rank's world. Under torchrun or srun the ranks are theirs, and it is called
    once in each. A rank that fails ends all, and its error is raised here.
    """
    try:
        pickle.dumps((function, args))
    except Exception as error:  # whatever refuses to be pickled
        raise UserError(
            f"lockstep.spawn starts processes, which must find {getattr(function, '__name__', 'the function')} and its "
            f"arguments by themselves: define it at the top of a file ({' '.join(str(error).split())[:150]})"
        ) from None
    launch = Launch(nproc, device, backend, share_gpu, timeout)
    if adopt_environment():
        launch.nproc = None
    return run_on_ranks(_as_a_rank, function, args, launch=launch)


def _as_a_rank(world: World, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _joined[:] = [world]
    try:
        return function(*args)
    finally:
        _joined.clear()
