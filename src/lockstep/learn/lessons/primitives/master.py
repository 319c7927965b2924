"""3. Processes and primitives: every rank runs this file."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def start_alike(model: nn.Module) -> None:
    """All ranks get rank 0's parameters."""
    for parameter in model.parameters():
        #: solution
        dist.broadcast(parameter.data, src=0)
        #: todo from rank 0 to all
        #: wrong no-broadcast
        # parameter.data.mul_(1)
        #: wrong from-itself
        # dist.broadcast(parameter.data, src=dist.get_rank())
        #: end


def deal(rows: Tensor | None, mine: Tensor) -> None:
    """Rank 0 has the rows of all shares together; each rank's own goes into `mine`."""
    #: solution
    pieces = None if rows is None else list(rows.chunk(dist.get_world_size()))
    dist.scatter(mine, pieces, src=0)
    #: todo rank 0 cuts the rows; each rank gets its piece
    #: end


def collect(value: Tensor) -> list[Tensor] | None:
    """All ranks' values on rank 0, None elsewhere."""
    first = dist.get_rank() == 0
    #: solution
    places = [torch.empty_like(value) for _ in range(dist.get_world_size())] if first else None
    dist.gather(value, places, dst=0)
    #: todo to rank 0 alone
    #: wrong for-everyone
    # places = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    # dist.all_gather(places, value)
    #: end
    return places if first else None


def everyone(value: Tensor) -> Tensor:
    """All ranks' values, stacked, on every rank."""
    places = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    #: solution
    dist.all_gather(places, value)
    #: todo to all
    #: end
    return torch.stack(places)


def total(value: Tensor) -> Tensor | None:
    """The sum on rank 0, None elsewhere; `value` stays as it is."""
    result = value.clone()
    #: solution
    dist.reduce(result, dst=0)
    #: todo the sum, to rank 0 alone
    #: end
    return result if dist.get_rank() == 0 else None


def first_then_others(action: Callable[[], None]) -> None:
    """Rank 0 acts while the others wait; then they act."""
    #: solution
    if dist.get_rank() == 0:
        action()
    dist.barrier()
    if dist.get_rank() != 0:
        action()
    #: todo no rank goes on before rank 0 is done
    #: wrong no-barrier
    # action()
    #: end
