"""DeMo (Peng and others, 2024): each rank keeps its momentum to itself, and sends only its fastest parts.

Of each bucket, in chunks of 64 numbers:

1. m <- decay m + g                 this rank's momentum
2. f = DCT(m)                       by frequencies (a cosine transform, orthonormal)
3. the largest k of f are sent, and taken out of m: what is slow stays, and adds up
4. the step goes by the sign of the ranks' sum, so that the size of what was sent does not matter

So it is made for SGD without momentum, at the small rates of sign descent (1e-3 and below). With k = 64 all of m is
sent in each step: then it is sign descent.

One reduction makes one step: of several backwards, all but the last belong into `no_sync()`.
"""

from collections.abc import Callable
from functools import cache
from math import pi

import torch
from torch import Tensor

from lockstep.comm.collectives import all_gather_async
from lockstep.parallel.data.bucket import Bucket
from lockstep.parallel.data.few_bits import padded
from lockstep.parallel.data.law import FREQUENCIES
from lockstep.parallel.data.reducer import Reducer

DECAY = 0.999


class DeMo(Reducer):
    """Sends `kept` frequencies of 64."""

    def __init__(self, kept: int) -> None:
        self.kept = min(FREQUENCIES, kept)
        self.momentum: Tensor | None = None
        self._before: Tensor | None = None  # the momentum before this step, should the step be skipped

    def start(self, bucket: Bucket) -> Callable[[], None]:
        gradients = padded(bucket.gradients, FREQUENCIES).view(-1, FREQUENCIES)
        transform = cosines(gradients.dtype, gradients.device)
        before = torch.zeros_like(gradients) if self.momentum is None else self.momentum
        momentum = DECAY * before + gradients
        found = momentum @ transform.T
        places = found.abs().topk(self.kept, dim=1, sorted=False).indices
        values = found.gather(1, places)
        all_values, value_work = all_gather_async(values, group=bucket.group, purpose="gradients")
        all_places, place_work = all_gather_async(places.to(torch.uint8), group=bucket.group, purpose="gradients")
        flag_work = bucket.sum_over_ranks(bucket.flags, "flags")
        sent = torch.zeros_like(found).scatter_(1, places, values) @ transform
        self._before = self.momentum
        if bool(momentum.isfinite().all()):  # else it would poison all steps to come
            self.momentum = momentum - sent

        def finish() -> None:
            for work in (value_work, place_work, flag_work):
                work.wait()
            total = torch.zeros_like(found)
            for theirs, what in zip(all_places, all_values, strict=True):  # same order, same sum on every rank
                total.scatter_add_(1, theirs.long(), what)
            if self.momentum is not None:
                for slice_ in bucket.slices_that_none_uses():  # what was sent of them is not used either
                    self.momentum.view(-1)[slice_] = before.view(-1)[slice_]
            step = total @ transform
            bucket.gradients.copy_(torch.where(step.isfinite(), step.sign(), step).view(-1)[: len(bucket.gradients)])

        return finish

    def forget_step(self) -> None:
        self.momentum = self._before

    def state(self) -> dict[str, Tensor]:
        return {} if self.momentum is None else {"momentum": self.momentum}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.momentum = state.get("momentum")


@cache
def cosines(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Row f: the cosine of frequency f, of length one. Rows are orthogonal, so the transposed one goes back."""
    n = FREQUENCIES
    places = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(pi / n * (places + 0.5) * places[:, None]) * (2 / n) ** 0.5
    matrix[0] /= 2**0.5
    return matrix.to(device, dtype)
