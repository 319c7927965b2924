"""11. ZeRO 1 and 2: shard the optimizer's state, then the gradients."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: solution
PREDICTED_STATE: int | None = 2 * -(-1000 // 3) * 8
#: skeleton
# PREDICTED_STATE: int | None = None  # bytes on one rank: two moments, 1,000 parameters of 8 bytes, 3 ranks
#: end


def adam(weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, lr: float) -> None:
    """One step of Adam, in place, with torch's defaults."""
    first.lerp_(gradient, 1 - 0.9)
    second.lerp_(gradient**2, 1 - 0.999)
    scale = (second / (1 - 0.999**step)).sqrt() + 1e-8
    weights -= lr * (first / (1 - 0.9**step)) / scale


class ShardedAdam:
    """Each rank updates its own piece of the parameters, and keeps the moments of that piece only."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        self.parameters, self.lr, self.steps = parameters, lr, 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        total = sum(p.numel() for p in parameters)
        #: solution
        self.piece = -(-total // self.size)
        flat = self.flatten([p.detach() for p in parameters])
        self.shard = flat[self.rank * self.piece : (self.rank + 1) * self.piece].clone()
        #: todo how long is a piece, padding included, and which one is mine?
        #: wrong whole-state
        # self.piece = -(-total // self.size)
        # self.shard = self.flatten([p.detach() for p in parameters])
        #: end
        self.first, self.second = torch.zeros_like(self.shard), torch.zeros_like(self.shard)

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        """End to end, padded with zeros to `size` pieces."""
        flat = torch.cat([t.flatten() for t in tensors])
        return nn.functional.pad(flat, (0, self.size * self.piece - len(flat)))

    def step(self) -> None:
        self.steps += 1
        gradient = self.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        #: solution
        mine = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(mine, gradient)
        adam(self.shard, mine / self.size, self.first, self.second, self.steps, self.lr)
        flat = torch.empty_like(gradient)
        dist.all_gather_into_tensor(flat, self.shard)
        #: todo reduce-scatter, update, all-gather
        # flat = gradient
        #: wrong whole-state
        # dist.all_reduce(gradient)
        # adam(self.shard, gradient / self.size, self.first, self.second, self.steps, self.lr)
        # flat = self.shard
        #: wrong all-reduces
        # dist.all_reduce(gradient)
        # mine = gradient[self.rank * self.piece : (self.rank + 1) * self.piece] / self.size
        # adam(self.shard, mine, self.first, self.second, self.steps, self.lr)
        # flat = torch.empty_like(gradient)
        # dist.all_gather_into_tensor(flat, self.shard)
        #: wrong never-gathers
        # mine = torch.empty_like(self.shard)
        # dist.reduce_scatter_tensor(mine, gradient)
        # adam(self.shard, mine / self.size, self.first, self.second, self.steps, self.lr)
        # flat = self.flatten([p.detach() for p in self.parameters])
        # flat[self.rank * self.piece : (self.rank + 1) * self.piece] = self.shard
        #: wrong sum
        # mine = torch.empty_like(self.shard)
        # dist.reduce_scatter_tensor(mine, gradient)
        # adam(self.shard, mine, self.first, self.second, self.steps, self.lr)
        # flat = torch.empty_like(gradient)
        # dist.all_gather_into_tensor(flat, self.shard)
        #: end
        pieces = flat[: sum(p.numel() for p in self.parameters)].split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.data.copy_(piece.view_as(parameter))
