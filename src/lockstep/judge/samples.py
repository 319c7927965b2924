"""Digests of what a model is given: which samples did all ranks together see?

A digest is a number of 64 bits for each row, along each of the first two dimensions: a batch may come as (batch,
sequence) or (sequence, batch), and ranks may share out either.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

DIMENSIONS = 2
MOST = 10_000
"""Along the second dimension: more are no samples."""


def tensors_in(arguments: Any) -> list[Tensor]:
    """What comes from the data: a result of a computation has a history."""
    return [
        leaf
        for leaf in tree_leaves(arguments)
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.grad_fn is None and not leaf.requires_grad
    ]


def noted(tensor: Tensor) -> dict[str, Any]:
    """{"shape", "dtype", "rows": [digests along dimension 0, along dimension 1], "elements": of all, in any order}."""
    here = tensor.detach().to("cpu")
    if hasattr(here, "to_local"):
        here = here.to_local()
    numbers = _numbers(here)
    rows = [_digests(numbers, dim) for dim in range(min(DIMENSIONS, here.dim())) if not dim or here.shape[dim] < MOST]
    elements = int(_mixed(numbers).sum())
    return {
        "shape": list(here.shape),
        "dtype": str(here.dtype).removeprefix("torch."),
        "rows": rows,
        "elements": elements,
    }


def _numbers(tensor: Tensor) -> Tensor:
    """As int64, bit by bit."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        tensor = tensor.double().view(torch.int64)  # the same number has the same digest at any precision
    return tensor.long()


def _digests(numbers: Tensor, dim: int) -> list[int]:
    count = numbers.shape[dim]
    rows = numbers.movedim(dim, 0).reshape(count, numbers.numel() // count if count else 0)
    places = _mixed(torch.arange(rows.shape[1], device="cpu") + 1) | 1
    found: list[int] = (_mixed(rows) * places).sum(1).tolist()
    return found


def _mixed(numbers: Tensor) -> Tensor:
    """Every bit of the result depends on every bit given."""
    mixed = (numbers ^ (numbers >> 31)) * 0x7FB5D329728EA185
    mixed = (mixed ^ (mixed >> 27)) * -0x7E2561E4B2D1CBAF
    return mixed ^ (mixed >> 33)
