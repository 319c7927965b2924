"""What the shm backend takes: tensors as flat pieces of CPU memory, or a reason why not."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import UserError


def flat(tensor: Tensor, any_order: bool = False) -> Tensor:
    """All elements in a row, sharing the tensor's memory but not its history in autograd.

    `any_order`: in the order in which they lie in memory, which all ranks have in common (channels-last, transposed).
    """
    if not tensor.is_cpu:
        raise ValueError(f"the shm backend moves CPU tensors, and this one is on {tensor.device}; use nccl or gloo")
    if tensor.layout != torch.strided:
        raise UserError("the shm backend moves dense tensors, and this one is sparse; use --backend gloo")
    if tensor.is_contiguous():
        row = tensor.data if tensor.dim() == 1 else tensor.data.view(-1)
    elif any_order and _is_dense(tensor):
        row = tensor.data.as_strided((tensor.numel(),), (1,))
    else:
        raise ValueError("the shm backend moves contiguous tensors; call .contiguous() first")
    return torch.view_as_real(row).view(-1) if row.is_complex() else row


def own_dtype(tensor: Tensor) -> torch.dtype:
    """The user's dtype: complex where torch.distributed has given us a view of pairs of real numbers instead."""
    base = tensor._base
    return base.dtype if base is not None and base.is_complex() else tensor.dtype


def layout(tensor: Tensor) -> int:
    """The order of the elements in memory: 0 for row-major, else a hash of sizes and strides."""
    if tensor.is_contiguous():
        return 0
    number = 1
    for value in (*tensor.shape, *tensor.stride()):
        number = (number * 1_000_003 + value) % (2**62 - 57)
    return number


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= length
    return True


def rows(tensor: Tensor, splits: list[int], size: int) -> Sequence[Tensor]:
    """The tensor cut along its first dimension: evenly, or by the given sizes."""
    if not splits:
        if tensor.numel() and tensor.size(0) % size:
            raise ValueError(f"all_to_all: {tensor.size(0)} rows do not divide among {size} ranks; give split sizes")
        return flat(tensor).chunk(size) if tensor.numel() else [flat(tensor)] * size
    if len(splits) != size or any(s < 0 for s in splits) or sum(splits) != tensor.size(0):
        raise ValueError(
            f"all_to_all: splits {list(splits)} do not cut {tensor.size(0)} rows into one part for each of {size} ranks"
        )
    return [flat(part) for part in tensor.split(list(splits))]


def check_lists(inputs: Sequence[Tensor], outputs: Sequence[Tensor], size: int) -> None:
    """Check the lists of an all_to_all: one tensor per rank, all of one dtype."""
    if len(inputs) != size or len(outputs) != size:
        raise ValueError(
            f"all_to_all over {size} ranks needs {size} tensors to send and to receive, but got {len(inputs)} and "
            f"{len(outputs)}"
        )
    dtypes = sorted({str(t.dtype) for t in (*inputs, *outputs)})
    if len(dtypes) > 1:
        raise ValueError(f"all_to_all needs tensors of one dtype, but got {' and '.join(dtypes)}")


def check_parts(operation: str, parts: Sequence[Tensor], whole: Tensor, size: int) -> None:
    if [p.numel() for p in parts] != [whole.numel()] * size or any(p.dtype != whole.dtype for p in parts):
        raise ValueError(
            f"{operation} over {size} ranks needs {size} tensors of {whole.numel()} {whole.dtype} elements each, "
            f"but got {[p.numel() for p in parts]} of {sorted({str(p.dtype) for p in parts})}"
        )
