"""As scripts are written for GPUs: NCCL, a device by LOCAL_RANK, bf16 autocast, fused AdamW; DDP, FSDP2 or DTensor."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("wrapper", choices=["plain", "ddp", "fsdp", "tp", "zero3"])
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--fault", default="")
given = parser.parse_args()

ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
torch.cuda.set_device(device)
if ranks > 1:
    dist.init_process_group("nccl", device_id=device)
torch.manual_seed(rank if given.fault == "seeds" else 5)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=128, tokens=256):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = plain = Net().to(device)
if given.wrapper == "ddp":
    model = DistributedDataParallel(model, device_ids=[device.index])
elif given.wrapper == "fsdp":
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
elif given.wrapper == "tp":
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (ranks,))
    parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
elif given.wrapper == "zero3":
    import lockstep

    model = lockstep.FullyShardedDataParallel(model)
if given.compile:
    model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=given.wrapper != "tp")
data = torch.randint(256, (12, 16, 33), generator=torch.Generator().manual_seed(2))
mine, of = (0, 1) if given.wrapper == "tp" else (rank, ranks)
if given.fault == "same_samples":
    mine = 0
for step in data:
    rows = step[mine::of].to(device)
    for part in rows.chunk(given.accumulate):
        with torch.autocast("cuda", torch.bfloat16, enabled=given.bf16):
            called = plain if given.fault == "bypassed" else model
            logits = called(part[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten())
        (loss if given.fault == "undivided" else loss / given.accumulate).backward()
    if given.fault == "summed" and ranks > 1:
        for parameter in model.parameters():
            parameter.grad.mul_(ranks)
    if given.clip:
        nn.utils.clip_grad_norm_(model.parameters(), given.clip)
    optimizer.step()
    optimizer.zero_grad()
if ranks > 1:
    dist.destroy_process_group()
