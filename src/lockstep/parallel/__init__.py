"""The mechanisms by hand: each in one file that reads from top to bottom, usable in anybody's own loop."""

from lockstep.parallel.context import gather_sequence, ring_attention, shard_sequence, ulysses_attention
from lockstep.parallel.data_parallel import DataParallel
from lockstep.parallel.fully_sharded import FullyShardedDataParallel
from lockstep.parallel.local_sgd import LocalSGD
from lockstep.parallel.parallel_linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.schedule import pipeline_schedule
from lockstep.parallel.sharded_data_parallel import ShardedDataParallel
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.parallel.tensor import tensor_parallel
from lockstep.parallel.vocabulary import vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "DataParallel",
    "FullyShardedDataParallel",
    "LocalSGD",
    "Pipeline",
    "RowParallelLinear",
    "ShardedDataParallel",
    "ShardedOptimizer",
    "VocabParallelEmbedding",
    "gather_sequence",
    "pipeline_schedule",
    "ring_attention",
    "shard_sequence",
    "tensor_parallel",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
]
