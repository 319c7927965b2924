"""What sharded data parallelism sends and holds, by ZeRO's stage; n ranks.

    stage   gradients        parameters                      a rank holds 1/n of
    1       reduce-scatter   all-gather, after the step      optimizer state
    2       reduce-scatter   all-gather, after the step      optimizer state, gradients
    3       reduce-scatter   all-gather, before each use     optimizer state, gradients, parameters

Stages 1 and 2 send as much as an all-reduce. Stage 3 gathers each block for forward and again for backward: half as
much more. In a pipeline a stage gathers only once and keeps that for all its micro-batches: it then holds its
parameters and gradients unsharded until the step ends.
"""

from math import ceil, prod

from lockstep.parallel.data.law import flags_of
from lockstep.parallel.law import NOTHING, Sent, Shape, all_gather, all_reduce, reduce_scatter

FLAG_BYTES = 4
"""Flags ("used on this rank") are sent separately, in fp32."""


def gathers(zero: int, in_pipeline: bool, twice: bool = True) -> int:
    """How often a block is gathered per micro-batch, in a pipeline per step. `twice`: it is released after forward."""
    return 2 if zero >= 3 and twice and not in_pipeline else 1


def divided(zero: int, in_pipeline: bool) -> tuple[bool, bool, bool]:
    """Whether a rank holds only one n-th of parameters, of gradients, of optimizer state at a step's peak."""
    if zero >= 3 and in_pipeline:
        return False, False, True
    return zero >= 3, zero >= 2, zero >= 1


def sharded_state(buckets: list[list[int]], parameters: int, itemsize: int, n: int) -> Sent:
    """Stages 1 and 2: gradients to their owners, parameters back. `buckets`: elements of their parameters."""
    nbytes = sum(padded(bucket, itemsize, n) for bucket in buckets) * itemsize
    each_way = reduce_scatter(nbytes, n) + all_gather(nbytes, n)
    return each_way.in_pieces(len(buckets)) + flags(parameters, n)


def fully_sharded(
    blocks: list[list[int]], outside: list[int], parameters: int, times: int, gathered: int, reduced: int, n: int
) -> Sent:
    """Stage 3: blocks are gathered `times` times, the parameters outside once; all reduced once. `gathered`, `reduced`:
    bytes of an element.
    """
    total = NOTHING
    for count, unit in [*((times, block) for block in blocks), *([(1, outside)] if outside else [])]:
        elements = padded(unit, gathered, n)
        total += all_gather(elements * gathered, n) * count + reduce_scatter(elements * reduced, n)
    return total + flags(parameters, n)


def flags(parameters: int, n: int) -> Sent:
    """Of all parameters together; 0: they are sent with those of others."""
    return all_reduce(flags_of(parameters) * FLAG_BYTES, n) if parameters else NOTHING


def fsdp2(
    blocks: list[Shape], outside: list[Shape], times: int, gathered: int, reduced: int, n: int, copies: int = 1
) -> Sent:
    """FSDP2 cuts each parameter along its first dimension over n ranks, and pads that. Between `copies` the shards of
    the gradients are all-reduced.
    """
    inside, rest = (sum(padded_rows(shape, n) for shape in shapes) for shapes in (blocks, outside))
    sent = all_gather((times * inside + rest) * gathered, n) + reduce_scatter((inside + rest) * reduced, n)
    return (sent + all_reduce((inside + rest) * reduced / n, copies)).in_pieces(None)


def padded(sizes: list[int], itemsize: int, n: int) -> int:
    """Elements of tensors laid end to end, each starting at a multiple of 16 bytes, padded to n equal parts."""
    align, end = max(1, 16 // itemsize), 0
    for size in sizes:
        end = ceil(end / align) * align + size
    return ceil(end / n) * n


def most_held(shapes: list[Shape], itemsize: int, n: int) -> float:
    """An upper bound on the bytes of one n-th, however it is cut: by elements, aligned to 16 bytes, and a flag, or
    by rows.
    """
    by_elements = [prod(shape) / n * itemsize + 32 for shape in shapes]
    by_rows = [padded_rows(shape, n) / n * itemsize for shape in shapes]
    return max(sum(by_elements), sum(by_rows))


def padded_rows(shape: Shape, n: int) -> int:
    return ceil(shape[0] / n) * n * prod(shape[1:])
