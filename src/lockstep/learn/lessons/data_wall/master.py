"""1. The data wall: one process, one model, a plain loop."""

import torch
from torch import Tensor, nn

#: solution
PREDICTED_PARAMETERS: int | None = 16 * (64 * 64 + 64)
#: skeleton
# PREDICTED_PARAMETERS: int | None = None  # 16 linear layers of width 64, biases included
#: end


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def build_model(width: int, layers: int) -> nn.Sequential:
    """`layers` linear layers of this width, a ReLU between each two."""
    modules: list[nn.Module] = []
    for layer in range(layers):
        if layer > 0:
            modules.append(nn.ReLU())
        #: solution
        modules.append(nn.Linear(width, width))
        #: todo a linear layer from width to width
        #: end
    return nn.Sequential(*modules)


def train(model: nn.Module, inputs: Tensor, targets: Tensor, batch_size: int, lr: float) -> list[float]:
    """One pass over the data, in order; the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses: list[float] = []
    #: solution
    for begin in range(0, len(inputs), batch_size):
        x, y = inputs[begin : begin + batch_size], targets[begin : begin + batch_size]
        optimizer.zero_grad()
        loss = mean_squared_error(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    #: todo for each slice: forget the old gradient, loss, backward, step
    #: wrong no-zero-grad
    # for begin in range(0, len(inputs), batch_size):
    #     x, y = inputs[begin : begin + batch_size], targets[begin : begin + batch_size]
    #     loss = mean_squared_error(model(x), y)
    #     loss.backward()
    #     optimizer.step()
    #     losses.append(loss.item())
    #: wrong drops-the-rest
    # for step in range(len(inputs) // batch_size):
    #     x, y = (t[step * batch_size : (step + 1) * batch_size] for t in (inputs, targets))
    #     optimizer.zero_grad()
    #     loss = mean_squared_error(model(x), y)
    #     loss.backward()
    #     optimizer.step()
    #     losses.append(loss.item())
    #: wrong step-first
    # for begin in range(0, len(inputs), batch_size):
    #     x, y = inputs[begin : begin + batch_size], targets[begin : begin + batch_size]
    #     optimizer.step()
    #     optimizer.zero_grad()
    #     loss = mean_squared_error(model(x), y)
    #     loss.backward()
    #     losses.append(loss.item())
    #: end
    return losses


def seconds_for(samples: int, done: int, seconds: float) -> float:
    """How long `samples` take, if `done` of them took `seconds`."""
    #: solution
    return seconds * samples / done
    #: todo in proportion
    #: wrong in-steps
    # return seconds * samples
    #: end
