"""Collectives, by hand and native, and the ledger that counts them.

`from lockstep.comm import all_reduce_mean` and the like are those of `comm/collectives.py`.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.comm.collectives import (
        all_gather,
        all_reduce,
        all_reduce_mean,
        all_to_all,
        barrier,
        broadcast,
        gather,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        send,
    )

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_mean",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]

__getattr__ = lazily(
    __name__,
    {n: "lockstep.comm.collectives" for name in __all__ for n in (name, f"{name}_async")},
)
"""`import lockstep` passes through here."""
