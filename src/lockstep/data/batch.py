"""A batch, and how a global batch is cut into the ranks' shares and a share into micro-batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.errors import UserError

T = TypeVar("T")

Inputs = Any
"""What a model is called with: a tensor, or a nest of tuples, lists and dicts of tensors; rows are samples in each."""

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


# ---- inputs: one tensor, or several --------------------------------------------------------------------------------


def mapped(nest: Any, change: Callable[[Tensor], Any]) -> Any:
    """The nest with every tensor changed; what is no tensor (a flag, a name) stays as it is."""
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, dict):
        return {key: mapped(value, change) for key, value in nest.items()}
    if isinstance(nest, tuple | list):
        parts = [mapped(value, change) for value in nest]
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)  # a named tuple, or plain
    return nest


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """From the first to the last."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, dict | tuple | list):
        for value in nest.values() if isinstance(nest, dict) else nest:
            yield from tensors_in(value)


def first_rows(nest: Any) -> Tensor:
    """The first tensor that has rows; a number alone has none."""
    return next(t for t in tensors_in(nest) if t.dim())


def called_with(module: nn.Module | Callable[..., Any], inputs: Inputs) -> Any:
    """`module(inputs)`; of a tuple or a list `module(*inputs)`, of a dict `module(**inputs)`."""
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)


@dataclass
class Batch:
    """Inputs and targets, first dimension = samples.

    A rank whose share is empty still has to take part in every collective, so it computes a `filler`: some
    real sample whose loss counts zero.
    """

    inputs: Inputs
    targets: Tensor
    filler: bool = False

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Batch":
        """Move to `device`; floating-point tensors also to `dtype`."""

        def move(t: Tensor) -> Tensor:
            if device.type == "cuda" and not t.is_cuda:
                t = t.pin_memory()  # else the host would wait until the copy is done
            return t.to(device, dtype if t.is_floating_point() else None, non_blocking=True)

        return replace(self, inputs=mapped(self.inputs, move), targets=move(self.targets))

    def share(self, share: Share) -> "Batch":
        """This share's samples; one filler sample if it has none."""
        rows, filler = share.rows_or_filler(len(self))
        inputs = mapped(self.inputs, lambda t: t[rows] if t.dim() else t)
        return replace(self, inputs=inputs, targets=self.targets[rows], filler=self.filler or filler)

    def micro_batches(self, count: int) -> list["Batch"]:
        """Exactly `count` micro-batches on every rank, so that all ranks issue the same collectives."""
        return [self.share(Share(i, count)) for i in range(count)]

    def target_count(self, ignored: int = IGNORED) -> int | Tensor:
        """How many targets the mean loss is taken over: samples, or tokens that are not `ignored` (padding).

        Tokens are counted where they are, and the count stays there: reading it would make the host wait for a GPU.
        """
        if self.filler:
            return 0
        if self.targets.is_floating_point():
            return len(self)
        return (self.targets != ignored).sum()


def shard_batch(batch: T, rank: int, world_size: int) -> T:
    """The rows of a global batch that `rank` trains on: a tensor, or any nest of tuples, lists and dicts of tensors.

    Shares are contiguous and together hold every row exactly once; sizes differ by at most one, so with an uneven
    batch weight each rank's mean loss by its rows.

        inputs, targets = lockstep.shard_batch((inputs, targets), world.rank, world.size)
    """
    share = Share(rank, world_size)

    found: Any = batch
    if isinstance(found, Batch):
        result: T = found.share(share)  # type: ignore[assignment]
        return result
    lengths = sorted({len(t) for t in tensors_in(batch) if t.dim()})
    if not lengths:
        raise UserError(f"shard_batch cuts tensors and nests of them, but was given a {type(batch).__name__}")
    if len(lengths) > 1:
        raise UserError(
            f"shard_batch cuts the rows of a batch, and was given tensors of {' and '.join(map(str, lengths))} rows"
        )
    result = mapped(batch, lambda t: t[share.of(len(t))] if t.dim() else t)
    return result
