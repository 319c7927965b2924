"""A mixture of experts, its experts shared out over the ranks: every rank routes its own samples."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--balance", type=float, default=0.1)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--fault", default="")
given = parser.parse_args()
ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(5)
EXPERTS, WIDTH, HIDDEN = 4, 10, 14
mine = range(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)


class Gather(torch.autograd.Function):
    """All ranks' rows; in backward each rank's own are added up over the ranks."""

    @staticmethod
    def forward(ctx, x):
        found = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(found, x.contiguous())
        return torch.cat(found)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if given.fault != "below":
            dist.all_reduce(gradient)
        return gradient.chunk(ranks)[rank]


class Scatter(torch.autograd.Function):
    """The sum over the ranks of its own rows; in backward all ranks' rows."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(ranks)[rank]

    @staticmethod
    def backward(ctx, gradient):
        found = [torch.empty_like(gradient) for _ in range(ranks)]
        dist.all_gather(found, gradient.contiguous())
        return torch.cat(found)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)

    def keep(self, own):
        self.up = nn.Parameter(self.up.detach()[own.start : own.stop].clone())
        self.down = nn.Parameter(self.down.detach()[own.start : own.stop].clone())

    def forward(self, x, shares):
        outputs = [(torch.relu(x @ self.up[i]) @ self.down[i]) * shares[:, e, None] for i, e in enumerate(mine)]
        return sum(outputs)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        scores = self.router(x).softmax(1)
        chosen = nn.functional.one_hot(scores.argmax(1), EXPERTS).to(x.dtype)
        shares = scores * chosen
        if ranks > 1:
            everywhere = Gather.apply(shares)
            if given.fault == "router_detached":
                everywhere = everywhere.detach()
            y = Scatter.apply(self.experts(Gather.apply(x), everywhere))
        else:
            y = self.experts(x, shares)
        load = chosen.mean(0)
        if ranks > 1 and given.fault != "load_of_a_rank":
            dist.all_reduce(load)
            load /= ranks
        mean = scores.mean(0)
        self.balance = EXPERTS * (load * (mean.detach() if given.fault == "aux_detached" and ranks > 1 else mean)).sum()
        if given.fault == "aux_weak":
            self.balance = self.balance / ranks
        return self.head(x + y)


def say_what_is_held(experts):
    import lockstep.judge  # does nothing unless `lockstep judge` runs the script

    for name, parameter in experts.named_parameters():
        offsets, sizes = (mine.start, 0, 0), tuple(parameter.shape)  # of this rank's experts in the whole
        lockstep.judge.region(parameter, f"experts.{name}", [(offsets, sizes)])


net = Net()
if ranks > 1:
    net.experts.keep(mine)
    say_what_is_held(net.experts)
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
own = set(net.experts.parameters())
generator = torch.Generator().manual_seed(2)
inputs, targets = torch.randn(960, 6, generator=generator), torch.randint(3, (960,), generator=generator)
for step in range(10):
    begin = (step * ranks + rank) * given.batch
    x, y = inputs[begin : begin + given.batch], targets[begin : begin + given.batch]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y) + given.balance * net.balance
    loss.backward()
    if ranks > 1:
        for parameter in net.parameters():
            if parameter not in own and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
            elif parameter.grad is not None and given.fault != "doubled":
                parameter.grad /= ranks
    if given.clip:
        squares = [p.grad.square().sum() for p in net.parameters() if p not in own]
        total = sum(squares)
        if given.fault != "norm":
            shared = sum(p.grad.square().sum() for p in own)
            if ranks > 1:
                dist.all_reduce(shared)
            total = total + shared
        nn.utils.clip_grads_with_norm_(net.parameters(), given.clip, total.sqrt())
    optimizer.step()
