"""Products of rows with one matrix per group: the linear layers of all experts at once.

Rows lie group by group. On a GPU in bf16 one kernel multiplies all groups, and its sizes stay on the device; elsewhere
each group is multiplied in turn, into its part of one output. Either way the gradient of all matrices is one tensor: to
index a matrix per expert would make autograd add as many tensors of the full size.
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_variadic

from lockstep.models.autocast import autocast_dtype

ALIGNED = 16
"""Bytes, of which the GPU's kernel wants a multiple per row."""


class Counts:
    """How many rows each group has."""

    def __init__(self, counts: Tensor, on_host: list[int] | None = None) -> None:
        """`on_host`: the same, where the host knows them already."""
        self.tensor, self._known = counts, on_host

    @cached_property
    def on_host(self) -> list[int]:
        """On a GPU this waits for what computes them."""
        found: list[int] = self.tensor.tolist() if self._known is None else self._known
        return found

    @cached_property
    def ends(self) -> Tensor:
        """Where each group's rows end."""
        return self.tensor.cumsum(0, dtype=torch.int32)

    def slices(self) -> list[tuple[int, slice]]:
        """(group, its rows) of groups that have any."""
        found, start = [], 0
        for group, count in enumerate(self.on_host):
            if count:
                found.append((group, slice(start, start + count)))
            start += count
        return found


def grouped_linear(rows: Tensor, weight: Tensor, counts: Counts) -> Tensor:
    """rows (rows, in), weight (groups, out, in) -> (rows, out). Under autocast in its dtype, as a linear layer."""
    if has_torch_function_variadic(rows, weight):  # a schedule may defer the weights' gradients
        found: Tensor = handle_torch_function(grouped_linear, (rows, weight), rows, weight, counts)
        return found
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
    product: Tensor = _GroupedLinear.apply(rows, weight.to(rows.dtype), counts)
    return product


def joined_pair(rows: Tensor, first: Tensor, second: Tensor, counts: Counts) -> Tensor | None:
    """Two layers of the same rows as one product, (rows, out of the first + out of the second), where one kernel
    multiplies all groups: rows are read once, and their gradients need no addition. None elsewhere.
    """
    dtype = autocast_dtype(rows.device) or rows.dtype
    if has_torch_function_variadic(rows, first) or not fits_kernel(rows, dtype, rows.shape[1], first.shape[1]):
        return None
    return grouped_linear(rows, _Joined.apply(first, second, dtype), counts)


class _Joined(torch.autograd.Function):
    """(groups, a, in) and (groups, b, in) -> (groups, a + b, in) in another dtype, in one pass over each."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.width, ctx.dtype = first.shape[1], first.dtype
        groups, rows, width = first.shape
        both = torch.empty(groups, rows + second.shape[1], width, dtype=dtype, device=first.device)
        both[:, :rows].copy_(first)
        both[:, rows:].copy_(second)
        return both

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        parts = gradient[:, : ctx.width], gradient[:, ctx.width :]
        first, second = (torch.empty(part.shape, dtype=ctx.dtype, device=part.device).copy_(part) for part in parts)
        return first, second, None


class _GroupedLinear(torch.autograd.Function):
    """As `grouped_linear`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return forward_product(rows, weight, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        wants_rows, wants_weight, _ = ctx.needs_input_grad
        gradient = gradient.contiguous()
        for_rows = rows_gradient(gradient, weight, ctx.counts) if wants_rows else None
        for_weight = weight_gradient(gradient, rows, ctx.counts) if wants_weight else None
        return for_rows, for_weight, None


def forward_product(rows: Tensor, weight: Tensor, counts: Counts) -> Tensor:
    if in_one_kernel(rows, weight):
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=counts.ends)
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    for group, mine in counts.slices():
        torch.mm(rows[mine], weight[group].t(), out=out[mine])
    return out


def rows_gradient(gradient: Tensor, weight: Tensor, counts: Counts) -> Tensor:
    if in_one_kernel(gradient, weight):
        return F.grouped_mm(gradient, weight, offs=counts.ends)
    out = gradient.new_zeros(gradient.shape[0], weight.shape[2])
    for group, mine in counts.slices():
        torch.mm(gradient[mine], weight[group], out=out[mine])
    return out


def weight_gradient(gradient: Tensor, rows: Tensor, counts: Counts) -> Tensor:
    """Zero for a group without rows."""
    if in_one_kernel(gradient, rows):
        return F.grouped_mm(gradient.t(), rows, offs=counts.ends)
    out = rows.new_zeros(len(counts.tensor), gradient.shape[1], rows.shape[1])
    for group, mine in counts.slices():
        torch.mm(gradient[mine].t(), rows[mine], out=out[group])
    return out


def in_one_kernel(a: Tensor, b: Tensor) -> bool:
    """For matrices of these rows."""
    return b.numel() > 0 and a.dtype == b.dtype and fits_kernel(a, a.dtype, *a.shape[1:], *b.shape[1:])


def fits_kernel(rows: Tensor, dtype: torch.dtype, *widths: int) -> bool:
    """A GPU in bf16, rows that its matrix units can read, and some of them."""
    aligned = all(width * dtype.itemsize % ALIGNED == 0 for width in widths)
    return rows.is_cuda and dtype == torch.bfloat16 and rows.numel() > 0 and aligned
