"""One training loop, every strategy: only the line that wraps the model differs.

python examples/own_loop.py --strategy zero3 --nproc 2
torchrun --nproc_per_node=4 examples/own_loop.py --strategy ddp
python examples/own_loop.py --strategy bucketed --folder checkpoints   # a second run goes on where this one ended
"""

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

STRATEGIES = ("naive", "flat", "overlap", "bucketed", "zero1", "zero2", "zero3", "ddp", "fsdp")


def wrapped(model: nn.Module, strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model spread over the ranks, and the optimizer for what is left to train on this one."""
    if strategy in ("zero1", "zero2"):
        sharded = lockstep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        return lockstep.ShardedDataParallel(model, sharded, stage=int(strategy[-1])), sharded
    if strategy == "zero3":
        model = lockstep.FullyShardedDataParallel(model)
    elif strategy == "ddp":
        model = DistributedDataParallel(model)
    elif strategy == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    else:
        model = lockstep.DataParallel(model, sync=strategy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(strategy: str, steps: int, folder: str | None) -> float:
    world = lockstep.init()
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    model, optimizer = wrapped(model.to(world.device), strategy)
    start = lockstep.load(folder, model, optimizer) if folder else 0
    loss = torch.zeros(())
    for step in range(start + 1, start + steps + 1):
        generator = torch.Generator().manual_seed(step)  # the global batch of a step is the same on all ranks
        inputs = torch.randn(256, 32, generator=generator)
        batch = (inputs, inputs[:, :4].argmax(1))
        mine, targets = (t.to(world.device) for t in lockstep.shard_batch(batch, world.rank, world.size))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(mine), targets)
        loss.backward()
        optimizer.step()
        if world.is_main and step % 20 == 0:
            print(f"step {step:4}  loss of rank 0's samples {loss.item():.4f}")
    if folder:
        lockstep.save(folder, model, optimizer, step=start + steps)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="bucketed")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="of checkpoints")
    given = parser.parse_args()
    lockstep.spawn(train, given.strategy, given.steps, given.folder, nproc=given.nproc)


if __name__ == "__main__":
    main()
