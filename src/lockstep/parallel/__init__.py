"""The mechanisms by hand: each in one file that reads from top to bottom, usable in anybody's own loop."""

from lockstep.parallel.data_parallel import DataParallel
from lockstep.parallel.fully_sharded import FullyShardedDataParallel
from lockstep.parallel.local_sgd import LocalSGD
from lockstep.parallel.sharded_data_parallel import ShardedDataParallel
from lockstep.parallel.sharded_optimizer import ShardedOptimizer

__all__ = ["DataParallel", "FullyShardedDataParallel", "LocalSGD", "ShardedDataParallel", "ShardedOptimizer"]
