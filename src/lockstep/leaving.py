"""The end of a process that is a rank."""

import sys
from typing import Any


def leave(nccl: bool = False) -> None:
    """At the end of a process whose script has not called `destroy_process_group`: gloo's threads, left to themselves,
    may end it by SIGABRT. `nccl`: NCCL's as well, which waits for the other ranks; without, they end with the process.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    if nccl or "nccl" not in dist.get_backend():
        dist.destroy_process_group()
