"""Data parallelism written by hand: every rank reduces its gradients itself, in one flat bucket."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--fault", default="")
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--double", action="store_true")
given = parser.parse_args()
ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(rank if given.fault == "seeds" else 0)
if given.double:
    torch.set_default_dtype(torch.float64)
net = nn.Sequential()
net.add_module("first", nn.Linear(6, 24))
net.add_module("act", nn.Tanh())
net.add_module("second", nn.Linear(24, 24))
net.add_module("act2", nn.Tanh())
net.add_module("last", nn.Linear(24, 3))
net.register_buffer("mean", torch.zeros(6))
if given.fault == "broadcast_half" and ranks > 1:
    torch.manual_seed(rank)
    nn.init.normal_(net.second.weight)
adam = torch.optim.Adam(net.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(7)
inputs = torch.randn(600, 6, generator=generator).to(torch.get_default_dtype())
targets = torch.randn(600, 3, generator=generator).to(torch.get_default_dtype())
last_step = None


def reduce_gradients(step):
    global last_step
    parameters = [p for p in net.parameters() if p.grad is not None]
    if given.fault == "skips_bias":
        parameters = [p for p in parameters if p is not net.last.bias]
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    own = flat.clone()
    if given.fault == "bf16":
        half = flat.bfloat16()
        dist.all_reduce(half)
        flat = half.to(flat.dtype)
    elif given.fault == "own_group":
        dist.all_reduce(flat, group=groups[rank // 2])
        flat *= ranks // 2
    else:
        dist.all_reduce(flat)
    if given.fault != "sum":
        flat /= ranks
    if given.fault == "last_piece":
        flat[-1:] = own[-1:]
    if given.fault == "boundary":
        flat[100:132] = own[100:132]
    if given.fault == "stale":
        flat, last_step = (flat if last_step is None else last_step), flat.clone()
    begin = 0
    for p in parameters:
        p.grad.copy_(flat[begin : begin + p.numel()].view_as(p))
        begin += p.numel()


groups = [dist.new_group([0, 1]), dist.new_group([2, 3])] if given.fault == "own_group" and ranks == 4 else []
for step in range(40):
    begin = step * given.batch * ranks + rank * given.batch
    if given.fault == "uneven" or given.fault == "uneven_right":
        total = 12
        cut = 8 if ranks > 1 else 12
        begin = step * total + (0 if rank == 0 else cut)
        given.batch = cut if rank == 0 else total - cut
    x, y = inputs[begin : begin + given.batch], targets[begin : begin + given.batch]
    adam.zero_grad()
    net.mean.lerp_((x if given.fault == "buffer" else inputs[step * 12 : step * 12 + 12]).mean(0), 0.1)
    loss = ((net(x) - y) ** 2).mean()
    if given.fault == "loss":
        loss = loss + 7
    if given.fault == "uneven_right":
        loss = ((net(x) - y) ** 2).sum() / (12 * 3) * ranks
    if given.fault == "detached" and ranks > 1:
        loss = ((net.last(net.act2(net.second(net.act(net.first(x))).detach())) - y) ** 2).mean()
    loss.backward()
    if ranks > 1:
        if given.fault == "clip_own":
            nn.utils.clip_grad_norm_(net.parameters(), given.clip)
        if given.fault != "nothing":
            reduce_gradients(step)
    if given.clip and given.fault != "clip_own":
        nn.utils.clip_grad_norm_(net.last.parameters() if given.fault == "norm" else net.parameters(), given.clip)
    if given.fault == "forgets" and step == 1:
        adam.state.clear()
    if not (given.fault == "skips_step" and ranks > 1 and rank == 1 and step == 1):
        adam.step()
