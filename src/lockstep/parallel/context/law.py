"""What context parallelism sends in one layer of attention; n ranks, each with 1/n of the positions.

ring      keys and values to the next rank, n - 1 times in forward and again in backward; their gradients as often
ulysses   an all-to-all of queries, keys, values and outputs in forward, and of their gradients in backward
"""

from lockstep.parallel.law import Sent, all_to_all, message


def hops(n: int) -> int:
    """Hops of a ring in forward; backward has as many for keys and values, and as many for their gradients."""
    return n - 1


def ring(keys_and_values: float, n: int) -> Sent:
    """`keys_and_values`: bytes of one rank's."""
    return message(keys_and_values) * (3 * hops(n))


def ulysses(queries: float, keys: float, n: int) -> Sent:
    """Bytes of one rank's queries, as many as its outputs, and of its keys, as many as its values."""
    one_way = all_to_all(queries, n) * 2 + all_to_all(keys, n) * 2
    return one_way * 2
