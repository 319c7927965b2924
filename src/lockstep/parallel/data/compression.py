"""How a bucket is sent: as it is, or compressed.

Every method takes a bucket whose gradients are already divided by the number of ranks, starts the communication and
returns a function that waits for it and leaves the sum over the ranks, that is the mean gradient, in the bucket.

`int8`, `1bit`, `topk` and `powersgd` send only part of the gradient in each step; the rest is added to the next step's
gradient (error feedback). Summed over the ranks, sent + kept = all gradients so far, exactly.
"""

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from lockstep.comm.collectives import all_gather_async
from lockstep.errors import UserError
from lockstep.parallel.data.bucket import Bucket
from lockstep.parallel.data.demo import DeMo
from lockstep.parallel.data.few_bits import sum_in_few_bits
from lockstep.parallel.data.law import FREQUENCIES
from lockstep.parallel.data.reducer import Reducer


class Plain(Reducer):
    """One all-reduce of gradients and flags."""

    def start(self, bucket: Bucket) -> Callable[[], None]:
        return bucket.sum_over_ranks(bucket.buffer).wait


class Cast(Reducer):
    """One all-reduce in a smaller dtype: half the bytes, 8 (bf16) or 11 (fp16) significant bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def start(self, bucket: Bucket) -> Callable[[], None]:
        small = bucket.buffer.to(self.dtype)
        pending = bucket.sum_over_ranks(small)

        def finish() -> None:
            pending.wait()
            bucket.buffer.copy_(small)

        return finish


class ErrorFeedback(Reducer):
    """Shared by int8, 1bit, topk and powersgd: what was not sent is kept as a residual."""

    def __init__(self) -> None:
        self.residual: Tensor | None = None
        self._before: Tensor | None = None  # the residual before this step, should the step be skipped

    def forget_step(self) -> None:
        self.residual = self._before

    def add_residual(self, bucket: Bucket) -> Tensor:
        """Add the residual of earlier steps. Parameters without a gradient in this step keep theirs for later."""
        if self.residual is None:
            self.residual = torch.zeros_like(bucket.gradients)
        bucket.gradients += self.residual
        for unused in bucket.unused_slices():
            bucket.gradients[unused] = 0
        return self.residual

    def keep(self, bucket: Bucket, unsent: Tensor) -> None:
        """Remember `unsent`; never NaN, which would poison all steps to come."""
        assert self.residual is not None
        self._before = self.residual
        for unused in bucket.unused_slices():
            unsent[unused] += self.residual[unused]
        self.residual = unsent.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def state(self) -> dict[str, Tensor]:
        return {} if self.residual is None else {"residual": self.residual}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.residual = state.get("residual")


class TopK(ErrorFeedback):
    """Each rank sends the `ratio` largest elements of its own bucket, as (value, index) pairs, by all-gather."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio

    def start(self, bucket: Bucket) -> Callable[[], None]:
        self.add_residual(bucket)
        k = min(len(bucket.gradients), max(1, ceil(self.ratio * len(bucket.gradients))))
        indices = bucket.gradients.abs().topk(k, sorted=False).indices
        values, value_work = all_gather_async(bucket.gradients[indices], group=bucket.group, purpose="gradients")
        places, place_work = all_gather_async(indices.int(), group=bucket.group, purpose="gradients")
        flag_work = bucket.sum_over_ranks(bucket.flags, "flags")
        self.keep(bucket, bucket.gradients.index_fill(0, indices, 0.0))

        def finish() -> None:
            for work in (value_work, place_work, flag_work):
                work.wait()
            bucket.gradients.zero_()
            for rank_places, rank_values in zip(places, values, strict=True):  # same order, same sum on every rank
                bucket.gradients.index_add_(0, rank_places, rank_values)

        return finish


class FewBits(ErrorFeedback):
    """An all-reduce of codes of 8 bits, or of one: a quarter of fp32's bytes, or a thirty-second."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def start(self, bucket: Bucket) -> Callable[[], None]:
        self.add_residual(bucket)
        finish_sum = sum_in_few_bits(bucket.gradients, self.bits, bucket.group, "gradients")
        flag_work = bucket.sum_over_ranks(bucket.flags, "flags")

        def finish() -> None:
            total, unsent = finish_sum()
            flag_work.wait()
            bucket.gradients.copy_(total)
            for slice_ in bucket.slices_that_none_uses():  # a sign is no zero
                unsent[slice_] = 0.0
            self.keep(bucket, unsent)

        return finish


class PowerSGD(ErrorFeedback):
    """Sends each matrix M as two thin ones, by one step of power iteration (Vogels et al. 2019).

        P = M Q, averaged; P orthonormalized; Q = Mᵀ P, averaged; the gradient becomes P Qᵀ.

    Q starts from the last step's, so that the iteration converges over the steps. Vectors, and matrices that two thin
    factors would not make smaller, are sent as they are, together with P.
    """

    def __init__(self, rank: int, seed: int = 0) -> None:
        super().__init__()
        self.rank, self.seed = rank, seed
        self.q: dict[int, Tensor] = {}  # index of the parameter in the bucket -> (columns, rank)

    def start(self, bucket: Bucket) -> Callable[[], None]:
        self.add_residual(bucket)
        before = bucket.gradients.clone()
        matrices = {i: view for i, view in enumerate(self._matrices(bucket)) if view is not None}
        for i, matrix in matrices.items():
            if i not in self.q or not bool(self.q[i].isfinite().all()):
                generator = torch.Generator().manual_seed(self.seed + i)  # the same Q on every rank
                q = torch.randn(matrix.shape[1], self._rank_of(matrix), generator=generator, dtype=torch.float64)
                self.q[i] = q.to(matrix)
        whole = [bucket.gradients[s] for i, s in enumerate(bucket.slices) if i not in matrices]
        products = [matrix @ self.q[i] for i, matrix in matrices.items()]
        first = torch.cat([t.reshape(-1) for t in (*products, *whole, bucket.flags)])
        pending = bucket.sum_over_ranks(first)

        def finish() -> None:
            pending.wait()
            sizes = [t.numel() for t in (*products, *whole, bucket.flags)]
            parts = list(first.split(sizes))
            bucket.flags.copy_(parts.pop())
            ps = [orthonormal(parts.pop(0).view_as(product)) for product in products]
            second = torch.cat(
                [(m.T @ p).reshape(-1) for m, p in zip(matrices.values(), ps, strict=True)] or [first[:0]]
            )
            if len(second):
                bucket.sum_over_ranks(second).wait()
            for (i, matrix), p in zip(matrices.items(), ps, strict=True):
                self.q[i] = second[: self.q[i].numel()].view_as(self.q[i]).clone()
                second = second[self.q[i].numel() :]
                matrix.copy_(p @ self.q[i].T)
            for target, part in zip(whole, parts, strict=True):
                target.copy_(part)
            # Each rank subtracts its share of what was sent from what it had; `scale` is 1 / ranks.
            unsent = before.sub_(bucket.gradients, alpha=bucket.scale)
            for i, slice_ in enumerate(bucket.slices):
                if i not in matrices:  # sent whole
                    unsent[slice_] = 0
            self.keep(bucket, unsent)

        return finish

    def _rank_of(self, matrix: Tensor) -> int:
        return min(self.rank, *matrix.shape)

    def _matrices(self, bucket: Bucket) -> list[Tensor | None]:
        """Each parameter's gradient as (first dimension, all others), or None where compression does not pay."""
        found: list[Tensor | None] = []
        for slice_, parameter in zip(bucket.slices, bucket.parameters, strict=True):
            matrix = bucket.gradients[slice_].view(parameter.shape[0], -1) if parameter.dim() > 1 else None
            if matrix is not None and sum(matrix.shape) * self._rank_of(matrix) >= matrix.numel():
                matrix = None
            found.append(matrix)
        return found

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **{f"q{i}": q for i, q in self.q.items()}}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.q = {int(name[1:]): q for name, q in state.items() if name.startswith("q")}


def orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns' span; NaN if there is a NaN, so that the step is skipped and not failed."""
    if not bool(matrix.isfinite().all()):
        return matrix.fill_(float("nan"))
    exact = matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
    return torch.linalg.qr(exact).Q.to(matrix.dtype)


COMPRESSIONS = ("none", "bf16", "fp16", "int8", "1bit", "topk", "powersgd", "demo")


def make_reducer(compression: str, topk_ratio: float, powersgd_rank: int) -> Reducer:
    match compression:
        case "none":
            return Plain()
        case "bf16":
            return Cast(torch.bfloat16)
        case "fp16":
            return Cast(torch.float16)
        case "int8" | "1bit":
            return FewBits(8 if compression == "int8" else 1)
        case "demo":
            return DeMo(ceil(topk_ratio * FREQUENCIES))
        case "topk":
            return TopK(topk_ratio)
        case "powersgd":
            return PowerSGD(powersgd_rank)
    raise UserError(f"compression is {compression!r}, but it must be one of {', '.join(COMPRESSIONS)}")
