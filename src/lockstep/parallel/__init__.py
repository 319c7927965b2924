"""The mechanisms by hand: each in one file that reads from top to bottom, usable in anybody's own loop."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.parallel.context import gather_sequence, ring_attention, shard_sequence, ulysses_attention
    from lockstep.parallel.data_parallel import DataParallel
    from lockstep.parallel.fully_sharded import FullyShardedDataParallel
    from lockstep.parallel.gradient_norm import clip_grad_norm_
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
    "clip_grad_norm_",
    "gather_sequence",
    "pipeline_schedule",
    "ring_attention",
    "shard_sequence",
    "tensor_parallel",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
]

_HOMES = {
    "ColumnParallelLinear": "lockstep.parallel.parallel_linear",
    "DataParallel": "lockstep.parallel.data_parallel",
    "FullyShardedDataParallel": "lockstep.parallel.fully_sharded",
    "LocalSGD": "lockstep.parallel.local_sgd",
    "Pipeline": "lockstep.parallel.pipeline",
    "RowParallelLinear": "lockstep.parallel.parallel_linear",
    "ShardedDataParallel": "lockstep.parallel.sharded_data_parallel",
    "ShardedOptimizer": "lockstep.parallel.sharded_optimizer",
    "VocabParallelEmbedding": "lockstep.parallel.parallel_linear",
    "clip_grad_norm_": "lockstep.parallel.gradient_norm",
    "gather_sequence": "lockstep.parallel.context",
    "pipeline_schedule": "lockstep.parallel.schedule",
    "ring_attention": "lockstep.parallel.context",
    "shard_sequence": "lockstep.parallel.context",
    "tensor_parallel": "lockstep.parallel.tensor",
    "ulysses_attention": "lockstep.parallel.context",
    "vocab_parallel_cross_entropy": "lockstep.parallel.vocabulary",
}


def __getattr__(name: str) -> Any:
    """Import torch when it is first needed: a schedule is drawn and planned with without it."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lockstep.parallel' has no attribute {name!r}")
