"""The mechanisms by hand, a folder each: data, zero, tensor, pipeline, context, experts, optimizer. Usable in a user's
own loop.

Begin with `data/data_parallel.py`, `zero/fully_sharded.py`, `tensor/parallel_linear.py`, `pipeline/schedule.py`,
`context/context_parallel.py`, `experts/expert_parallel.py` and `optimizer/muon.py`. `gradient_norm.py`, `holding.py`
and `guards.py` serve all of them.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.parallel.context.context_parallel import (
        gather_sequence,
        ring_attention,
        shard_sequence,
        ulysses_attention,
    )
    from lockstep.parallel.data.data_parallel import DataParallel
    from lockstep.parallel.data.local_sgd import LocalSGD
    from lockstep.parallel.experts.expert_parallel import expert_parallel
    from lockstep.parallel.gradient_norm import clip_grad_norm_
    from lockstep.parallel.optimizer.average import WeightAverage
    from lockstep.parallel.optimizer.low_bit import LowBitAdamW
    from lockstep.parallel.optimizer.muon import Muon
    from lockstep.parallel.optimizer.schedule_free import ScheduleFreeAdamW
    from lockstep.parallel.pipeline.pipeline import Pipeline
    from lockstep.parallel.pipeline.schedule import pipeline_schedule
    from lockstep.parallel.tensor.parallel_linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from lockstep.parallel.tensor.tensor_parallel import tensor_parallel
    from lockstep.parallel.tensor.vocabulary import vocab_parallel_cross_entropy
    from lockstep.parallel.zero.fully_sharded import FullyShardedDataParallel
    from lockstep.parallel.zero.sharded_data_parallel import ShardedDataParallel
    from lockstep.parallel.zero.sharded_optimizer import ShardedOptimizer

__all__ = [
    "ColumnParallelLinear",
    "DataParallel",
    "FullyShardedDataParallel",
    "LocalSGD",
    "LowBitAdamW",
    "Muon",
    "Pipeline",
    "RowParallelLinear",
    "ScheduleFreeAdamW",
    "ShardedDataParallel",
    "ShardedOptimizer",
    "VocabParallelEmbedding",
    "WeightAverage",
    "clip_grad_norm_",
    "expert_parallel",
    "gather_sequence",
    "pipeline_schedule",
    "ring_attention",
    "shard_sequence",
    "tensor_parallel",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
]

_HOMES = {
    "ColumnParallelLinear": "lockstep.parallel.tensor.parallel_linear",
    "DataParallel": "lockstep.parallel.data.data_parallel",
    "FullyShardedDataParallel": "lockstep.parallel.zero.fully_sharded",
    "LocalSGD": "lockstep.parallel.data.local_sgd",
    "LowBitAdamW": "lockstep.parallel.optimizer.low_bit",
    "Muon": "lockstep.parallel.optimizer.muon",
    "Pipeline": "lockstep.parallel.pipeline.pipeline",
    "RowParallelLinear": "lockstep.parallel.tensor.parallel_linear",
    "ScheduleFreeAdamW": "lockstep.parallel.optimizer.schedule_free",
    "ShardedDataParallel": "lockstep.parallel.zero.sharded_data_parallel",
    "ShardedOptimizer": "lockstep.parallel.zero.sharded_optimizer",
    "VocabParallelEmbedding": "lockstep.parallel.tensor.parallel_linear",
    "WeightAverage": "lockstep.parallel.optimizer.average",
    "clip_grad_norm_": "lockstep.parallel.gradient_norm",
    "expert_parallel": "lockstep.parallel.experts.expert_parallel",
    "gather_sequence": "lockstep.parallel.context.context_parallel",
    "pipeline_schedule": "lockstep.parallel.pipeline.schedule",
    "ring_attention": "lockstep.parallel.context.context_parallel",
    "shard_sequence": "lockstep.parallel.context.context_parallel",
    "tensor_parallel": "lockstep.parallel.tensor.tensor_parallel",
    "ulysses_attention": "lockstep.parallel.context.context_parallel",
    "vocab_parallel_cross_entropy": "lockstep.parallel.tensor.vocabulary",
}


__getattr__ = lazily(__name__, _HOMES)
"""Lazy, so that schedules can be drawn and used for planning without torch."""
