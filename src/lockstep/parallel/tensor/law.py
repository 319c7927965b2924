"""What tensor parallelism sends: the activations of a micro-batch, at every pair of a column and a row layer; n ranks.

                        forward                              backward
    column              -                                    all-reduce of the inputs' gradient
    row                 all-reduce of the outputs            -
    column, sequence    all-gather of the inputs             reduce-scatter, and the all-gather again
    row, sequence       reduce-scatter of the outputs        all-gather of the outputs' gradient

An all-reduce sends as much as a reduce-scatter and an all-gather: the only extra bytes of sequence parallelism are
those of gathering the inputs again, because a rank holds 1/n of them between forward and backward (with
`keep_gathered` it holds all of them and does not gather again).
"""

from lockstep.parallel.law import NOTHING, Sent, all_gather, all_reduce, reduce_scatter

PASSES_FORWARD = 2
"""How often a pair of layers sends its activations around the ring; an all-reduce counts as two."""


def passes_backward(gathers_again: bool) -> int:
    return PASSES_FORWARD + (1 if gathers_again else 0)


def column(inputs: float, n: int, sequence: bool, gathers_again: bool, pieces: int | None = 1) -> Sent:
    """`inputs`: bytes of all inputs of a micro-batch. `pieces`: how many parts of it sequence parallelism sends."""
    if not sequence:
        return all_reduce(inputs, n)
    gather = all_gather(inputs, n).in_pieces(pieces)
    return gather + reduce_scatter(inputs, n) + (gather if gathers_again else NOTHING)


def row(outputs: float, n: int, sequence: bool, pieces: int | None = 1) -> Sent:
    if not sequence:
        return all_reduce(outputs, n)
    return (reduce_scatter(outputs, n) + all_gather(outputs, n)).in_pieces(pieces)


def embedding(outputs: float, n: int, sequence: bool) -> Sent:
    """Cut along the vocabulary: each rank looks up its own rows, and the sum over ranks has all of them."""
    return row(outputs, n, sequence)


def replicated(parameters: float, n: int) -> Sent:
    """A layer that has seen this rank's positions only: its gradients are summed."""
    return all_reduce(parameters, n)


def cross_entropy(tokens: int, itemsize: int, n: int) -> Sent:
    """Over logits that are cut along the vocabulary: the largest, then the sum of exponentials and the target's."""
    return all_reduce(tokens * max(itemsize, 4), n) + all_reduce(2 * tokens * max(itemsize, 4), n)
