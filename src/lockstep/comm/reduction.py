"""How two tensors become one: what SUM, MAX, ... mean, for the collectives that we write ourselves."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Combine = Callable[..., Tensor]
"""Called as combine(a, b, out=a)."""

Op: Any = dist.ReduceOp.RedOpType
COMBINE: dict[Any, Combine] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,  # then divided by the number of ranks
    Op.PRODUCT: torch.mul,
    Op.MAX: torch.maximum,
    Op.MIN: torch.minimum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
# torch adds no unsigned integers wider than a byte; the sum of the same bits taken as signed is the same bits.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def reduction(reduce_op: Any, dtype: torch.dtype) -> tuple[Combine, bool]:
    """How to combine, and whether to divide the result by the number of ranks. Raises for what is not supported."""
    return _reduction(reduce_op if isinstance(reduce_op, Op) else reduce_op.op, dtype)


def reduction_name(reduce_op: Any) -> str:
    name: str = (reduce_op if isinstance(reduce_op, Op) else reduce_op.op).name
    return name


@lru_cache
def _reduction(op: Any, dtype: torch.dtype) -> tuple[Combine, bool]:
    combine = COMBINE.get(op)
    if combine is None:
        raise ValueError(f"reductions are {', '.join(o.name for o in COMBINE)}, and {op.name} was asked for")
    average = op == Op.AVG
    if average and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"AVG is for floating-point tensors, and this one is {dtype}; use SUM")
    if dtype.is_complex:  # added as pairs of real numbers
        if op not in (Op.SUM, Op.AVG):
            raise ValueError(f"{op.name} of {dtype} is not available; complex tensors can be summed and averaged")
        return combine, average
    if dtype in SIGNED:
        if op in (Op.MAX, Op.MIN):
            raise ValueError(f"torch has no {op.name} of {dtype}; convert to a signed type")
        return lambda a, b, out: combine(_signed(a), _signed(b), out=_signed(out)), average
    try:
        combine(torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype), out=torch.ones(1, dtype=dtype))
    except RuntimeError as error:
        raise ValueError(f"torch has no {op.name} of {dtype}: {error}") from None
    return combine, average


def _signed(tensor: Tensor) -> Tensor:
    return tensor.view(SIGNED.get(tensor.dtype, tensor.dtype))
