"""Data parallelism in its plainest form, with torch.distributed alone: each rank computes the gradients of its own
samples, then all average them, tensor by tensor, and take the same step.

    torchrun --nproc_per_node=2 examples/naive_ddp.py
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn


class NaiveTrainer:
    """A model, an optimizer, and steps that average gradients after backward."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: nn.Module) -> None:
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, src=0)  # all begin with rank 0's weights

    def now(self) -> float:
        """When all that was asked of a GPU is done."""
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def train_step(self, inputs: Tensor, targets: Tensor) -> dict[str, float]:
        """One step on this rank's samples: the mean loss of all, the time spent communicating, its share."""
        start = self.now()
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(inputs), targets)
        loss.backward()
        before = self.now()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)  # a sum: gloo's own average has been wrong
                parameter.grad /= dist.get_world_size()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        communication = self.now() - before
        self.optimizer.step()
        total = self.now() - start
        return {
            "loss": mean.item() / dist.get_world_size(),
            "communication_ms": 1e3 * communication,
            "share": communication / total,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one for each rank of this machine
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)).to(device)
    trainer = NaiveTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    inputs = torch.randn(256 * size, 32)
    targets = inputs[:, :4].argmax(1)
    inputs, targets = inputs.to(device), targets.to(device)
    mine = slice(256 * rank, 256 * (rank + 1))  # equal parts, so that the mean of means is the mean
    for step in range(1, steps + 1):
        report = trainer.train_step(inputs[mine], targets[mine])
        if rank == 0 and step % 10 == 0:
            ms, share = report["communication_ms"], report["share"]
            print(f"step {step:4}  loss {report['loss']:.4f}  communication {ms:.2f} ms, {share:.0%} of the step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
