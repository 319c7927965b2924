"""As PyTorch's tensor parallel example: a feed-forward network cut over a mesh; by hand with --own."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--own", action="store_true")
parser.add_argument("--fault", default="")
parser.add_argument("--silent", action="store_true")
given = parser.parse_args()
ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(11)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 32)
        self.down = nn.Linear(32, 5)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


class Same(torch.autograd.Function):
    """The same on all ranks; in backward their gradients are added up."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if given.fault != "no_backward_sum":
            dist.all_reduce(gradient)
        return gradient


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Cut(nn.Module):
    def __init__(self, net):
        super().__init__()
        size = 32 // ranks
        mine = slice(rank * size, (rank + 1) * size)
        self.norm = net.norm
        self.up, self.down = nn.Linear(12, size), nn.Linear(size, 5)
        with torch.no_grad():
            self.up.weight.copy_(net.up.weight[mine])
            self.up.bias.copy_(net.up.bias[mine])
            self.down.weight.copy_(net.down.weight[:, mine])
            self.down.bias.copy_(net.down.bias)
        if not given.silent:
            import lockstep.judge

            start = rank * size
            lockstep.judge.region(self.up.weight, "up.weight", [((start, 0), (size, 12))])
            lockstep.judge.region(self.up.bias, "up.bias", [((start,), (size,))])
            lockstep.judge.region(self.down.weight, "down.weight", [((0, start), (5, size))])

    def forward(self, x):
        hidden = torch.relu(self.up(Same.apply(self.norm(x))))
        if given.fault == "bias_often":
            return Added.apply(self.down(hidden))
        return Added.apply(nn.functional.linear(hidden, self.down.weight)) + self.down.bias


net = Net()
if ranks > 1:
    dist.init_process_group("gloo")
    if given.own:
        net = Cut(net)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (ranks,))
        net = parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for step in range(9):
    x, y = torch.randn(10, 12, generator=generator), torch.randn(10, 5, generator=generator)
    optimizer.zero_grad()
    ((net(x) - y) ** 2).mean().backward()
    optimizer.step()
