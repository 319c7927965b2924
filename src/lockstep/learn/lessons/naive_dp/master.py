"""5. Naive data parallelism: shard the batch, broadcast, average."""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: solution
PREDICTED_BYTES: float | None = 2 * (3 - 1) / 3 * 1000 * 8
#: skeleton
# PREDICTED_BYTES: float | None = None  # sent by one rank in a step: 1,000 parameters of 8 bytes, 3 ranks
#: end


class Trainer:
    """The same on every rank; together they train as one process would."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model = model
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        #: solution
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        #: todo all ranks start with rank 0's weights
        #: wrong no-broadcast
        # del lr
        # lr = 0.1
        #: end
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def shard(self, batch: Tensor) -> Tensor:
        """This rank's rows."""
        #: solution
        return batch.tensor_split(self.size)[self.rank]
        #: todo sizes that differ by one at most, the larger ones first
        #: wrong whole-batch
        # return batch
        #: end

    def step(self, inputs: Tensor, targets: Tensor) -> dict[str, float]:
        """One step on the whole batch, of which this rank computes its share."""
        start = time.perf_counter()
        x, y = self.shard(inputs), self.shard(targets)
        self.optimizer.zero_grad()
        loss = ((self.model(x) - y) ** 2).mean()
        loss.backward()
        before = time.perf_counter()
        mean = self.average(loss.detach(), len(x), len(inputs))
        seconds = time.perf_counter() - before
        self.optimizer.step()
        return {"loss": mean, "comm_seconds": seconds, "comm_share": seconds / (time.perf_counter() - start)}

    def average(self, loss: Tensor, mine: int, everybody: int) -> float:
        """Gradients of the whole batch, on every rank; returns its loss. This rank has seen `mine` of `everybody`."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        #: solution
        for tensor in [*gradients, loss]:
            tensor *= mine / everybody
            dist.all_reduce(tensor)
        #: todo weighted by samples, one all-reduce for each gradient, and one for the loss
        #: wrong sum
        # for tensor in [*gradients, loss]:
        #     dist.all_reduce(tensor)
        # loss *= mine / everybody
        #: wrong plain-mean
        # for tensor in [*gradients, loss]:
        #     tensor /= self.size
        #     dist.all_reduce(tensor)
        #: wrong whole-batch
        # for tensor in [*gradients, loss]:
        #     tensor /= self.size
        #     dist.all_reduce(tensor)
        #: end
        return loss.item()
