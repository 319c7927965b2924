"""Lockstep: whatever the strategy, the ranks together train exactly as one process would."""

import atexit
from typing import TYPE_CHECKING

from lockstep.comm.register import register_shm
from lockstep.errors import UserError
from lockstep.lazy import lazily
from lockstep.leaving import leave

if TYPE_CHECKING:
    from lockstep.checkpoint.user_loop import load, save
    from lockstep.data import shard_batch
    from lockstep.launch.user_loop import init, spawn
    from lockstep.models.experts import MixtureOfExperts
    from lockstep.models.float8 import in_float8
    from lockstep.parallel import (
        DataParallel,
        FullyShardedDataParallel,
        LocalSGD,
        LowBitAdamW,
        Muon,
        Pipeline,
        ScheduleFreeAdamW,
        ShardedDataParallel,
        ShardedOptimizer,
        WeightAverage,
        clip_grad_norm_,
        expert_parallel,
        gather_sequence,
        pipeline_schedule,
        ring_attention,
        shard_sequence,
        tensor_parallel,
        ulysses_attention,
        vocab_parallel_cross_entropy,
    )

__version__ = "0.1.0"
__all__ = [
    "DataParallel",
    "FullyShardedDataParallel",
    "LocalSGD",
    "LowBitAdamW",
    "MixtureOfExperts",
    "Muon",
    "Pipeline",
    "ScheduleFreeAdamW",
    "ShardedDataParallel",
    "ShardedOptimizer",
    "UserError",
    "WeightAverage",
    "clip_grad_norm_",
    "expert_parallel",
    "gather_sequence",
    "in_float8",
    "init",
    "load",
    "pipeline_schedule",
    "ring_attention",
    "save",
    "shard_batch",
    "shard_sequence",
    "spawn",
    "tensor_parallel",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
]

_HOMES = {
    "DataParallel": "lockstep.parallel",
    "FullyShardedDataParallel": "lockstep.parallel",
    "LocalSGD": "lockstep.parallel",
    "LowBitAdamW": "lockstep.parallel",
    "MixtureOfExperts": "lockstep.models.experts",
    "Muon": "lockstep.parallel",
    "Pipeline": "lockstep.parallel",
    "ScheduleFreeAdamW": "lockstep.parallel",
    "ShardedDataParallel": "lockstep.parallel",
    "ShardedOptimizer": "lockstep.parallel",
    "WeightAverage": "lockstep.parallel",
    "clip_grad_norm_": "lockstep.parallel",
    "expert_parallel": "lockstep.parallel",
    "gather_sequence": "lockstep.parallel",
    "in_float8": "lockstep.models.float8",
    "init": "lockstep.launch.user_loop",
    "load": "lockstep.checkpoint.user_loop",
    "save": "lockstep.checkpoint.user_loop",
    "spawn": "lockstep.launch.user_loop",
    "pipeline_schedule": "lockstep.parallel",
    "ring_attention": "lockstep.parallel",
    "shard_batch": "lockstep.data",
    "shard_sequence": "lockstep.parallel",
    "tensor_parallel": "lockstep.parallel",
    "ulysses_attention": "lockstep.parallel",
    "vocab_parallel_cross_entropy": "lockstep.parallel",
}

register_shm()
atexit.register(leave)


def __dir__() -> list[str]:
    """So that help(lockstep) shows what has not been imported yet."""
    return sorted({*globals(), *__all__})


__getattr__ = lazily(__name__, _HOMES)
"""`lockstep --help` answers without torch."""
