"""FSDP2, and FSDP1 with --old: a small transformer, each block sharded."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--old", choices=["", "flat", "original"], default="")
parser.add_argument("--ddp-mesh", action="store_true")
parser.add_argument("--fault", default="")
parser.add_argument("--clip", type=float, default=0.0)
given = parser.parse_args()
ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(3)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(31, 18)
        self.blocks = nn.ModuleList(Block(18) for _ in range(2))
        self.head = nn.Linear(18, 31)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Net()
early = torch.optim.AdamW(model.parameters(), lr=1e-3) if given.fault == "early_optimizer" else None
if ranks > 1:
    dist.init_process_group("gloo")
    if given.old:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=given.old == "original",
            device_id=torch.device("cpu"),
        )
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        if given.ddp_mesh:
            mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if given.fault == "bf16" else None)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = early or torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(5)
text = torch.randint(31, (400, 13), generator=generator)
for step in range(12):
    begin = (step * ranks + rank) * given.batch
    rows = text[begin : begin + given.batch]
    loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
    loss.backward()
    if given.clip:
        if given.old and ranks > 1:
            model.clip_grad_norm_(given.clip)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), given.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
