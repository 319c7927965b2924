"""DDP and FSDP2 on the same model and batches, in turns: the same losses, at which time and memory.

python examples/compare_ddp_fsdp.py --nproc 2
"""

import argparse
import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lockstep


def network(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


class Candidate:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.seconds, self.losses = model, [], []  # type: nn.Module, list[float], list[float]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self, inputs: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        if inputs.is_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def bytes_held(self) -> int:
        """Of weights and the optimizer's state, on this rank."""
        tensors = [*self.model.parameters(), *(v for s in self.optimizer.state.values() for v in s.values())]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, Tensor)]
        return sum(t.nbytes for t in local)


def compare(width: int, layers: int, steps: int) -> dict[str, tuple[float, int, list[float]]]:
    world = lockstep.init()
    sharded = network(width, layers).to(world.device)
    for block in sharded:
        fully_shard(block)
    fully_shard(sharded)
    plain = DistributedDataParallel(network(width, layers).to(world.device))
    candidates = {"ddp": Candidate(plain), "fsdp2": Candidate(sharded)}
    for step in range(steps):
        torch.manual_seed(100 * step + world.rank)
        inputs = torch.randn(64, width, device=world.device)
        for candidate in candidates.values():
            candidate.step(inputs)
    return {name: (median(c.seconds[2:]), c.bytes_held(), c.losses) for name, c in candidates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nproc", 2), ("width", 512), ("layers", 6), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    found = lockstep.spawn(compare, given.width, given.layers, given.steps, nproc=given.nproc)[0]
    for name, (seconds, held, losses) in found.items():
        print(f"{name:6} {1e3 * seconds:8.2f} ms a step  {held / 2**20:7.1f} MiB held  last loss {losses[-1]:.6f}")
    difference = max(abs(a - b) for a, b in zip(found["ddp"][2], found["fsdp2"][2], strict=True))
    print(f"largest difference of a loss: {difference:.1e}")


if __name__ == "__main__":
    main()
