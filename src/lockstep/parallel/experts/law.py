"""What expert parallelism sends, over n ranks. A token's row has d elements, and goes to each of its k experts.

Rows to other ranks, S of this rank's own and R of theirs:

    forward     dispatch S, combine R       an all-to-all each, for each mixture and micro-batch
    backward    of combine S, of dispatch R

With equal use of all experts S = R = T k (n-1)/n, for T tokens: 4 T k d (n-1)/n elements per mixture. What is really
sent depends on the router; the law is exact for counts that are known. A forward pass that is repeated (recomputation,
or the count before a step of several micro-batches) sends S + R again.

Beside tensor parallelism, for each mixture:

    whole   each of the tp ranks has a part of the tokens: an all-gather of the results, and one of their gradients, if
            tokens are not cut along positions anyway; an all-reduce of the router's gradient
    cut     all-reduces of the results, of the tokens' gradients and of the weights'
"""

from collections.abc import Sequence

from lockstep.parallel.law import NOTHING, Sent, all_gather, all_reduce

Table = Sequence[Sequence[int]]
"""Rank -> expert -> rows."""


def equal_use(tokens: float, active: int, ranks: int) -> float:
    """Rows that leave a rank, where all experts are used alike."""
    return tokens * active * (ranks - 1) / ranks


def rows_of_others(table: Table, rank: int) -> tuple[int, int]:
    """(rows of this rank for experts of others, rows of others for its experts)."""
    held = len(table[0]) // len(table)
    mine = range(rank * held, (rank + 1) * held)
    sent = sum(count for expert, count in enumerate(table[rank]) if expert not in mine)
    received = sum(row[expert] for other, row in enumerate(table) if other != rank for expert in mine)
    return sent, received


def exchanged(sent: float, received: float, row_bytes: float, repeated: int = 0) -> Sent:
    """Of one mixture and micro-batch. `repeated`: forward passes beside the one that has a backward."""
    return Sent(2 + 2, 2 * (sent + received) * row_bytes) + Sent(2, (sent + received) * row_bytes) * repeated


def shared_tokens(tokens: int, row_bytes: float, n: int) -> Sent:
    """Whole experts: each of n tp ranks has a part of the tokens, the largest of which is sent by all."""
    return all_gather(-(-tokens // n) * n * row_bytes, n) * 2


def cut_experts(tokens: int, row_bytes: float, weight_bytes: float, n: int, sequence: bool) -> Sent:
    """Experts cut along their width over n tp ranks. `weight_bytes`: of the weights of one token's experts."""
    total = all_reduce(tokens * row_bytes, n) * 2 + all_reduce(tokens * weight_bytes, n)
    return total + (all_gather(tokens * row_bytes, n) * 2 if sequence else NOTHING)
