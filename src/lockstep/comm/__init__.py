"""Collectives, by hand and native, and the ledger that counts them.

`from lockstep.comm import all_reduce_mean` and the like are those of `comm/collectives.py`.
"""

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """Import torch when it is first needed: `import lockstep` passes through here."""
    if name.removesuffix("_async") in __all__:
        return getattr(importlib.import_module("lockstep.comm.collectives"), name)
    raise AttributeError(f"module 'lockstep.comm' has no attribute {name!r}")
