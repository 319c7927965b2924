"""What data parallelism sends: every gradient once in a step, over n ranks, in buckets.

    plain        an all-reduce of each bucket                                   2Ψ(n-1)/n elements
    bf16, fp16   the same, in two bytes
    topk         an all-gather of values and one of indices, of each bucket     Ψ · ratio · (n-1) of each
    powersgd     an all-reduce of each of two thin factors                      2(n-1)/n · rank · (rows + columns)

Ψ is the number of trained elements. Flags are sent with them: one for each parameter ("used on this rank") and one
for the outcome of backward. A rank holds all of Ψ: as parameters, as gradients and in the optimizer's state.
"""

from collections.abc import Sequence
from math import ceil, prod
from typing import TypeVar

from lockstep.parallel.law import NOTHING, Sent, Shape, all_gather, all_reduce

Kind = TypeVar("Kind")

FIRST_BUCKET_SHARE = 1 / 3
"""Size of the first bucket relative to the others: it closes early, so that communication starts early."""


def bucket_sizes(sizes: list[int], itemsize: int, bucket_mb: float, first_share: float = 1.0) -> list[list[int]]:
    """Elements of each parameter of each bucket: filled from the last parameter on, closed when the cap is reached."""
    return buckets_by_kind([(size, None) for size in sizes], itemsize, bucket_mb, first_share).get(None, [])


def buckets_by_kind(
    sizes: Sequence[tuple[int, Kind]], itemsize: int, bucket_mb: float, first_share: float = 1.0
) -> dict[Kind, list[list[int]]]:
    """As `bucket_sizes`, where only parameters of one kind share a bucket: (elements, kind) of each parameter."""
    cap = bucket_mb * 1024 * 1024 / itemsize
    closed: dict[Kind, list[list[int]]] = {}
    filling: dict[Kind, list[int]] = {}
    for size, kind in reversed(sizes):
        bucket = filling.setdefault(kind, [])
        bucket.append(size)
        if sum(bucket) >= (cap if closed else cap * first_share):
            closed.setdefault(kind, []).append(filling.pop(kind))
    for kind, bucket in filling.items():
        closed.setdefault(kind, []).append(bucket)
    return closed


def flags_of(parameters: int) -> int:
    return parameters + 1


def all_reduced(elements: int, flags: int, buckets: int, itemsize: int, n: int) -> Sent:
    return all_reduce((elements + flags) * itemsize, n).in_pieces(buckets)


def top_k(buckets: list[list[int]], flags: int, ratio: float, itemsize: int, n: int) -> Sent:
    """Of each bucket: values, int32 indices, flags."""
    kept = sum(min(sum(bucket), max(1, ceil(ratio * sum(bucket)))) for bucket in buckets)
    pairs = all_gather(n * kept * itemsize, n) + all_gather(n * kept * 4, n)
    return (pairs + all_reduce(flags * itemsize, n)).in_pieces(len(buckets))


def power_sgd(buckets: list[list[Shape]], flags: int, rank: int, itemsize: int, n: int) -> Sent:
    """Two rounds where a bucket has something to compress. What is not compressed travels with the first."""
    total = NOTHING
    for bucket in buckets:
        thin = [thin_elements(shape, rank) for shape in bucket]
        rounds = 2 if any(compressed for _, compressed in thin) else 1
        total += all_reduce(sum(elements for elements, _ in thin) * itemsize, n).in_pieces(rounds)
    return total + Sent(0, all_reduce(flags * itemsize, n).wire_bytes)


def thin_elements(shape: Shape, rank: int) -> tuple[int, bool]:
    """(elements sent for one parameter, whether it is sent as two thin factors)."""
    total = prod(shape)
    if len(shape) < 2:
        return total, False
    rows, columns = shape[0], total // shape[0]
    thin = (rows + columns) * min(rank, rows, columns)
    return (thin, True) if thin < total else (total, False)
