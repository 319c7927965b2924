"""Lockstep: whatever the strategy, the ranks together train exactly as one process would."""

from lockstep.data import shard_batch
from lockstep.errors import UserError
from lockstep.parallel import DataParallel, LocalSGD

__version__ = "0.1.0"
__all__ = ["DataParallel", "LocalSGD", "UserError", "shard_batch"]
