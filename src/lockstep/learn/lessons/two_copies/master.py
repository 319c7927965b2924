"""2. Two copies in one process: average the gradients by hand."""

import torch
from torch import Tensor, nn


def split(batch: Tensor, parts: int) -> list[Tensor]:
    """Rows in `parts` pieces whose sizes differ by one at most, the larger ones first."""
    #: solution
    return list(torch.tensor_split(batch, parts))
    #: todo cut the rows
    #: end


def average_gradients(models: list[nn.Module], counts: list[int]) -> None:
    """Give every copy the gradient of the mean over all samples; copy i has seen counts[i] of them."""
    for same in zip(*(model.parameters() for model in models), strict=True):  # one parameter, in each copy
        gradients = [parameter.grad for parameter in same]
        assert all(gradient is not None for gradient in gradients)
        #: solution
        total = sum(n * gradient for n, gradient in zip(counts, gradients, strict=True))
        for parameter in same:
            parameter.grad = (total / sum(counts)).clone()
        #: todo the mean over all samples, for every copy
        #: wrong sum
        # for parameter in same:
        #     parameter.grad = sum(gradients).clone()
        #: wrong plain-mean
        # for parameter in same:
        #     parameter.grad = (sum(gradients) / len(models)).clone()
        #: wrong first-only
        # total = sum(n * gradient for n, gradient in zip(counts, gradients, strict=True))
        # same[0].grad = total / sum(counts)
        #: end


def step(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], inputs: Tensor, targets: Tensor) -> float:
    """One step of all copies together; the mean loss over the whole batch."""
    shares = list(zip(split(inputs, len(models)), split(targets, len(models)), strict=True))
    total = 0.0
    for model, optimizer, (x, y) in zip(models, optimizers, shares, strict=True):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        #: solution
        total += len(x) * loss.item()
        #: todo the loss of the whole batch, weighted as the gradients are
        #: end
    average_gradients(models, [len(x) for x, _ in shares])
    for optimizer in optimizers:
        optimizer.step()
    return total / len(inputs)
