"""Gradients that are all-reduced together: one flat buffer, and each parameter's gradient a view of it.

    buffer   [ grad of p0 | grad of p1 | ... | used p0 | used p1 | ... ]

The tail holds one number per parameter: 1 where this rank's backward produced a gradient. Summed with the gradients it
says how many ranks used the parameter, so that "unused everywhere" (`grad` stays None) and "unused here" (`grad`
becomes the average) can be distinguished without a separate collective. The last bucket carries one more number,
this rank's `Outcome` of the backward pass: COMPLETE, LATE or FAILED.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from math import inf
from typing import TypeVar

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_reduce_async, new_buffer
from lockstep.comm.pending import Pending
from lockstep.layout.group import GroupLike, group_of

T = TypeVar("T", bound=Tensor)


class Outcome(float, Enum):
    """The outcome of a rank's backward pass; it is summed over the ranks, and the worst one dominates the sum."""

    COMPLETE = 0.0
    LATE = 1.0
    """Some gradients were ready after their bucket had been issued."""
    FAILED = inf
    """It raised an error: this rank's gradients are invalid."""

    @classmethod
    def worst(cls, total: float) -> "Outcome":
        """From the sum over the ranks."""
        return cls.FAILED if total == inf else cls.LATE if total > 0 else cls.COMPLETE


class Bucket:
    """Some parameters' gradients in one buffer, reduced together."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: GroupLike = None,
        carries_outcome: bool = False,
        algorithm: str = "native",
    ) -> None:
        self.parameters, self.group, self.algorithm = parameters, group_of(group), algorithm
        self.scale = 1.0 / self.group.size
        count = sum(p.numel() for p in parameters)
        like = parameters[0]
        self.buffer = new_buffer(count + len(parameters) + carries_outcome, like.dtype, like.device, group)
        self.gradients, self.flags = self.buffer[:count], self.buffer[count:]
        self.used, self.outcomes = self.flags[: len(parameters)], self.flags[len(parameters) :]
        self.outcome = Outcome.COMPLETE
        self.slices: list[slice] = []
        self.views: list[Tensor] = []
        start = 0
        for parameter in parameters:
            self.slices.append(slice(start, start + parameter.numel()))
            self.views.append(_view_like(self.gradients[self.slices[-1]], parameter))
            start += parameter.numel()
        self.finish: Callable[[], None] | None = None
        """Set while a reduction is in flight; waits for it."""
        self.reset()

    def reset(self) -> None:
        """Begin a new round."""
        self.placed = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.finish = None

    def place(self, index: int) -> None:
        """Move a parameter's gradient into the buffer, divided by the number of ranks in the same pass.

        Dividing before the sum makes the sum a mean, and keeps fp16 from overflowing. Until the mean is ready the
        parameter has no gradient: another backward must not add to a buffer that is in flight.
        """
        parameter, view = self.parameters[index], self.views[index]
        assert parameter.grad is not None
        gradient = parameter.grad.detach()  # with create_graph=True it is part of a graph
        if gradient.data_ptr() == view.data_ptr():
            view.mul_(self.scale)  # earlier micro-batches have added to the view in place
        else:
            torch.mul(gradient, self.scale, out=view)
        parameter.grad = None
        self.placed[index] = True
        self.missing -= 1

    def place_rest(self) -> None:
        """Backward is over: place what earlier micro-batches left behind; what is then missing counts as zero."""
        for index, parameter in enumerate(self.parameters):
            if not self.placed[index]:
                if parameter.grad is not None:
                    self.place(index)
                else:
                    self.views[index].zero_()

    def raise_flags(self) -> None:
        """Set the flags: for which parameters this rank has a gradient."""
        self.used.fill_(1.0)
        self.outcomes.fill_(self.outcome.value)
        if self.missing:
            for index, placed in enumerate(self.placed):
                if not placed:
                    self.used[index] = 0.0

    def sum_over_ranks(self, tensor: Tensor, purpose: str = "gradients") -> Pending:
        """Issue the all-reduce of what is sent for this bucket."""
        return all_reduce_async(tensor, group=self.group, purpose=purpose, algorithm=self.algorithm)

    def unused_slices(self) -> list[slice]:
        """Where the buffer holds no gradient of this rank."""
        return [s for s, placed in zip(self.slices, self.placed, strict=True) if not placed]

    def slices_that_none_uses(self) -> list[slice]:
        """Once the flags are summed: where no rank has a gradient."""
        return [s for s, count in zip(self.slices, self.used.tolist(), strict=True) if not count > 0]

    def hand_over(self) -> None:
        """Wait for the reduction and give each parameter its average; what no rank used keeps `grad=None`."""
        assert self.finish is not None
        self.finish()
        for index, parameter in enumerate(self.parameters):
            if self.placed[index] or bool(self.used[index] > 0):
                parameter.grad = self.views[index]
        self.reset()

    def late_parameters(self) -> list[nn.Parameter]:
        """Parameters that have a gradient although their first one is already in the buffer."""
        return [p for p, placed in zip(self.parameters, self.placed, strict=True) if placed and p.grad is not None]

    def total_of_outcomes(self) -> float:
        """After the reduction, of a bucket that carries them."""
        return float(self.outcomes)


def _view_like(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """A view with the parameter's own strides (channels-last, transposed) where those cover its memory densely."""
    dense = parameter.numel() == 0 or torch.empty_like(parameter).stride() == parameter.stride()
    if dense and not parameter.is_contiguous():
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def assign_buckets(
    tensors: Sequence[T],
    cap_bytes: float,
    first_cap_bytes: float | None = None,
    kind: Callable[[T], object] = lambda _: None,
) -> list[list[T]]:
    """Group tensors, in reverse order (backward's), into buckets of one dtype, closed once they reach `cap_bytes`. Only
    tensors of the same `kind` share one.

    So a bucket is at least that large, except the last of its dtype. The very first may have a smaller cap, so that
    communication starts early.
    """
    done: list[list[T]] = []
    filling: dict[object, list[T]] = {}
    for tensor in reversed(tensors):
        key = (tensor.dtype, tensor.device, kind(tensor))
        bucket = filling.setdefault(key, [])
        bucket.append(tensor)
        cap = first_cap_bytes if first_cap_bytes is not None and not done else cap_bytes
        if sum(t.nbytes for t in bucket) >= cap:
            done.append(filling.pop(key))
    return done + list(filling.values())
