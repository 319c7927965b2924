"""What data parallelism sends: every gradient once in a step, over n ranks, in buckets.

    plain        an all-reduce of each bucket                                   2Ψ(n-1)/n elements
    bf16, fp16   the same, in two bytes
    topk         an all-gather of values and one of indices, of each bucket     Ψ · ratio · (n-1) of each
    powersgd     an all-reduce of each of two thin factors                      2(n-1)/n · rank · (rows + columns)
    int8, 1bit   an all-to-all and an all-gather of codes and scales            2Ψ(n-1)/n · (1, 1/8) bytes, and scales
    demo         an all-gather of frequencies and where they stand              Ψ · kept / 64 · (n-1) of each

Ψ is the number of trained elements. Flags are sent with them: one for each parameter ("used on this rank") and one
for the outcome of backward. A rank holds all of Ψ: as parameters, as gradients and in the optimizer's state.
"""

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import TypeVar

from lockstep.parallel.law import NOTHING, Sent, Shape, all_gather, all_reduce, all_to_all

Kind = TypeVar("Kind")

BLOCK = 256
"""Numbers in few bits that share a scale."""
CHUNK = 4096
"""Numbers of which the largest are sent, each with its place in two bytes."""
FREQUENCIES = 64
"""Numbers that DeMo takes apart into frequencies together."""

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


# ---- numbers in few bits -------------------------------------------------------------------------------------------


def in_bits(elements: int, bits: int) -> int:
    """Bytes of codes and scales."""
    return ceil(elements / BLOCK) * (BLOCK * bits // 8 + 4)


def few_bits(elements: int, bits: int, n: int) -> Sent:
    """One array: parts to the rank that sums them, and the sums back."""
    part = in_bits(ceil(elements / (n * BLOCK)) * BLOCK, bits)
    return all_to_all(n * part, n) + all_gather(n * part, n)


def largest(elements: int, density: float, bits: int, itemsize: int, n: int) -> Sent:
    """One array: the largest numbers of each chunk, with their places."""
    kept = ceil(elements / CHUNK) * min(CHUNK, max(1, ceil(density * CHUNK)))
    values = ceil(kept / BLOCK) * BLOCK * itemsize if bits == 32 else in_bits(kept, bits)
    return all_gather(n * (2 * kept + values), n)


def quantized(buckets: list[list[int]], flags: int, bits: int, itemsize: int, n: int) -> Sent:
    total = Sent(len(buckets), all_reduce(flags * itemsize, n).wire_bytes)
    for bucket in buckets:
        total += few_bits(sum(bucket), bits, n)
    return total


def frequencies(buckets: list[list[int]], flags: int, kept: int, itemsize: int, n: int) -> Sent:
    """DeMo's: `kept` of each chunk, a byte for the place of each."""
    chunks = sum(ceil(sum(bucket) / FREQUENCIES) for bucket in buckets)
    sent = all_gather(n * chunks * kept * (itemsize + 1), n)
    return Sent(3 * len(buckets), sent.wire_bytes + all_reduce(flags * itemsize, n).wire_bytes)


# ---- ranks that train apart ----------------------------------------------------------------------------------------


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Numbers of the parameters of each fragment: in order, of about as many elements."""
    found: list[list[int]] = [[] for _ in range(count)]
    total, before = max(1, sum(sizes)), 0
    for number, size in enumerate(sizes):
        found[min(count - 1, (2 * before + size) * count // (2 * total))].append(number)
        before += size
    return [fragment for fragment in found if fragment]


def apart(sizes: list[int], fragments: int, itemsize: int, chunk_mb: float, sent: Callable[[int], Sent]) -> Sent:
    """What ranks that train apart send between two averages of the same parameters: each chunk of each fragment once.
    `sent`: of a chunk, by its elements.
    """
    total = NOTHING
    for fragment in fragments_of(sizes, fragments):
        for chunk in bucket_sizes([sizes[i] for i in fragment], itemsize, chunk_mb):
            total += sent(sum(chunk))
    return total
