"""Small scripts of one process that do odd things: the candidate is called with `wrong`."""

import sys
import time

import torch
from torch import nn

kind, wrong = sys.argv[1], "wrong" in sys.argv
torch.manual_seed(0)
net = nn.Linear(4, 2)
x = torch.randn(8, 4)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.whatever = net

    def forward(self, x):
        return self.whatever(x)


def train(model, batches=lambda: x, after=lambda step: None, times=lambda: 1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (model(batches()).pow(2).sum() * times()).backward()
        optimizer.step()
        after(step)


def crashes():
    def after(step):
        if wrong and step == 1:
            raise RuntimeError("the disk is gone")

    train(net, after=after)


def hangs():
    train(net, after=lambda step: time.sleep(1000) if wrong and step == 0 else None)


def has_no_optimizer():
    net(x).sum().backward()


def has_no_model():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        parameter.sum().backward()
        optimizer.step()


def has_a_closure():
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = net(x).pow(2).mean() * (2 if wrong else 1)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def prints_megabytes():
    train(net, after=lambda step: print("x" * 5_000_000))


def is_another_model():
    train(nn.Sequential(net, nn.Linear(2, 2)) if wrong else net)


def draws_without_a_seed():
    torch.seed()
    train(net, batches=lambda: torch.randn(8, 4))


def has_dropout():
    torch.seed()
    train(nn.Sequential(net, nn.Dropout(0.5)))


def wraps_its_model_itself():
    train(Outer() if wrong else net)


def has_a_nan():
    train(net, times=lambda: float("nan") if wrong else 1.0)


globals()[kind]()
