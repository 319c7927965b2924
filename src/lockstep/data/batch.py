"""A batch, and how a global batch is cut into the ranks' shares and a share into micro-batches."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.errors import UserError

T = TypeVar("T")

IGNORED = -100
"""A target that counts nowhere: padding of a token sequence (the value cross_entropy ignores)."""


@dataclass(frozen=True)
class Share:
    """Part `index` of `count` parts of a global batch, contiguous, sizes differing by at most one."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UserError(f"rank {self.index} of {self.count}: a rank goes from 0 to world_size - 1")

    def of(self, length: int) -> slice:
        """The rows of a batch of `length` that belong to this share; the first shares take the remainder."""
        base, extra = divmod(length, self.count)
        start = self.index * base + min(self.index, extra)
        return slice(start, start + base + (self.index < extra))

    def rows_or_filler(self, length: int) -> tuple[slice, bool]:
        """As `of`; an empty share takes the batch's first row instead, as a filler (True)."""
        rows = self.of(length)
        return (slice(0, 1), True) if rows.start == rows.stop else (rows, False)


@dataclass
class Batch:
    """Inputs and targets, first dimension = samples.

    A rank whose share is empty still has to take part in every collective, so it computes a `filler`: some
    real sample whose loss counts zero.
    """

    inputs: Tensor
    targets: Tensor
    filler: bool = False

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Batch":
        """Move to `device`; floating-point tensors also to `dtype`."""

        def move(t: Tensor) -> Tensor:
            if device.type == "cuda" and not t.is_cuda:
                t = t.pin_memory()  # else the host would wait until the copy is done
            return t.to(device, dtype if t.is_floating_point() else None, non_blocking=True)

        return Batch(move(self.inputs), move(self.targets), self.filler)

    def share(self, share: Share) -> "Batch":
        """This share's samples; one filler sample if it has none."""
        rows, filler = share.rows_or_filler(len(self))
        return Batch(self.inputs[rows], self.targets[rows], self.filler or filler)

    def micro_batches(self, count: int) -> list["Batch"]:
        """Exactly `count` micro-batches on every rank, so that all ranks issue the same collectives."""
        return [self.share(Share(i, count)) for i in range(count)]

    def target_count(self) -> int | Tensor:
        """How many targets the mean loss is taken over: samples, or tokens that are not padding.

        Tokens are counted where they are, and the count stays there: reading it would make the host wait for a GPU.
        """
        if self.filler:
            return 0
        if self.targets.is_floating_point():
            return len(self)
        return (self.targets != IGNORED).sum()


def shard_batch(batch: T, rank: int, world_size: int) -> T:
    """The rows of a global batch that `rank` trains on: a tensor, or any nest of tuples, lists and dicts of tensors.

    Shares are contiguous and together hold every row exactly once; sizes differ by at most one, so with an uneven
    batch weight each rank's mean loss by its rows.

        inputs, targets = lockstep.shard_batch((inputs, targets), world.rank, world.size)
    """
    share = Share(rank, world_size)

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[share.of(value.shape[0])]
        if isinstance(value, Batch):
            return value.share(share)
        if isinstance(value, dict):
            return {k: cut(v) for k, v in value.items()}
        if isinstance(value, tuple | list):
            parts = [cut(v) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # a named tuple, or plain
        raise UserError(f"shard_batch cuts tensors and nests of them, but was given a {type(value).__name__}")

    result: T = cut(batch)
    return result
