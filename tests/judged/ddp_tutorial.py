"""As the DDP tutorial has it: a model, DistributedDataParallel, a DistributedSampler, SGD or AdamW."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--optimizer", default="adamw")
parser.add_argument("--model", default="mlp")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--fault", default="")
given = parser.parse_args()

ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
distributed = "WORLD_SIZE" in os.environ
if distributed:
    dist.init_process_group("gloo")
torch.manual_seed(given.seed)


class Tied(nn.Module):
    """Input and output share a matrix."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        tokens = (x.abs() * 5).long().clamp(max=15)
        return self.head(self.norm(self.embed(tokens).mean(1)))


def make():
    if given.model == "tied":
        return Tied()
    norm = {"batchnorm": nn.BatchNorm1d(32), "layernorm": nn.LayerNorm(32)}.get(given.model, nn.Identity())
    return nn.Sequential(nn.Linear(10, 32), norm, nn.ReLU(), nn.Dropout(given.dropout), nn.Linear(32, 16))


model = make()
if given.fault == "sync_bn":
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
inner = model
if given.compile:
    model = torch.compile(model, backend="eager")
early = torch.optim.SGD(make().parameters(), lr=0.05) if given.fault == "other_optimizer" else None
if distributed:
    model = DistributedDataParallel(model)
rate = 0.01 * (ranks if given.fault == "rate" else 1)
kinds = {
    "sgd": lambda p: torch.optim.SGD(p, lr=5 * rate, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(
        p, lr=rate, weight_decay=0.1 if given.fault == "decay" and distributed else 0.01
    ),
    "zero": lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=rate, weight_decay=0.01),
}
optimizer = early or kinds[given.optimizer](model.parameters())
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(480, 10, generator=generator), torch.randint(16, (480,), generator=generator))
sampler = None
if distributed:
    if given.fault == "same_samples":
        sampler = DistributedSampler(data, num_replicas=ranks, rank=0, shuffle=False)
    else:
        sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=given.fault == "shuffled")
loader = DataLoader(data, given.batch, sampler=sampler, num_workers=given.workers)
if given.fault == "early_evaluation" and rank == 1:
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
loss_of = nn.CrossEntropyLoss()
model.train()
count = 0
for x, y in loader:
    if distributed and given.fault == "worker_moves" and count == 2 and rank == 1:
        with torch.no_grad():
            inner[0].weight.mul_(1.01)
    pieces = list(zip(x.chunk(given.accumulate), y.chunk(given.accumulate), strict=True))
    for i, (a, b) in enumerate(pieces):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=given.bf16):
            called = model.module if given.fault == "bypassed" and distributed else model
            loss = loss_of(called(a), b)
        loss = loss / (1 if given.fault == "undivided" and distributed else len(pieces))
        if given.fault == "times_ranks":
            loss = loss * ranks
        loss.backward()
    if given.clip:
        nn.utils.clip_grad_norm_(model.parameters(), given.clip)
    optimizer.step()
    if given.fault != "kept" or not distributed:
        optimizer.zero_grad()
    count += 1
    if rank == 0:
        print(f"step {count} loss {loss.item():.4f}")
