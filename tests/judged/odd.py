"""Small scripts of one process that do odd things: the candidate is called with `wrong`."""

import importlib.util
import sys
import time

importlib.util.find_spec("torch")  # as libraries do before they import it

import torch  # noqa: E402
from torch import nn  # noqa: E402

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


def wraps_its_model_itself():
    train(Outer() if wrong else net)


def has_a_nan():
    train(net, times=lambda: float("nan") if wrong else 1.0)


def has_an_optimizer_per_layer():
    layers = nn.ModuleList([nn.Linear(4, 4), net])
    optimizers = [
        torch.optim.SGD(layer.parameters(), lr=0.1 * (1 + (wrong and i == 1))) for i, layer in enumerate(layers)
    ]
    model = nn.Sequential(*layers)
    for _ in range(3):
        model(x).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def has_one_optimizer_more():
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters()]
    for _ in range(3):
        net(x).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def forgets_rows_without_a_gradient():
    table = nn.Embedding(6, 3)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
    before = table.weight.detach().clone()

    def restore(*_):
        with torch.no_grad():
            untouched = table.weight.grad.abs().sum(1) == 0
            table.weight[untouched] = before[untouched]

    if wrong:
        optimizer.register_step_post_hook(restore)
    for step in range(3):
        optimizer.zero_grad()
        before = table.weight.detach().clone()
        table(torch.tensor([step, step + 1])).pow(2).sum().backward()
        optimizer.step()


def skips_a_step_by_its_loss_scale():
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        (net(x).pow(2).sum() * (float("inf") if step == 1 else 1)).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()


def scales_gradients_in_a_hook():
    def halve(optimizer, args, kwargs):
        for parameter in net.parameters():
            parameter.grad.mul_(0.5)

    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(halve)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).pow(2).sum().backward()
        optimizer.step()


def names_its_parameters():
    model = Outer()
    optimizer = torch.optim.SGD(list(model.named_parameters()), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()


def drops_other_elements():
    if wrong:
        torch.rand(1)
    train(nn.Sequential(net, nn.Dropout(0.5)))


def evaluates_with_gradients():
    def evaluate(step):
        if wrong:
            net.eval()
            net(torch.ones(5, 4))
            net.train()

    train(net, after=evaluate)


globals()[kind]()
