"""What this rank holds and trains of a model in the user's own loop: plain, cut, or in any of the wrappers.

By the names of the whole model, so that ranks can compare: checkpoints and the norm of the gradient derive from it.
"""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.layout.region import Held, Region, region_of
from lockstep.parallel.data.data_parallel import DataParallel
from lockstep.parallel.data.local_sgd import LocalSGD
from lockstep.parallel.pipeline.pipeline import Pipeline
from lockstep.parallel.zero.fully_sharded import FullyShardedDataParallel
from lockstep.parallel.zero.sharded_data_parallel import ShardedDataParallel
from lockstep.parallel.zero.sharded_optimizer import OwnedPiece, ShardedOptimizer

WRAPPERS = (DataParallel, ShardedDataParallel, FullyShardedDataParallel, LocalSGD, DistributedDataParallel)


def unwrapped(model: Any) -> nn.Module:
    """What a wrapper is around; a model's own part may be called `module` too."""
    if isinstance(model, Pipeline):
        return model.stage
    found: nn.Module = model.module if isinstance(model, WRAPPERS) else model
    return found


def held_by(model: Any) -> dict[str, Held]:
    """Every parameter, or piece of one, that lies in this rank's memory."""
    if isinstance(model, FullyShardedDataParallel):
        return {name: Held(parameter, region) for name, parameter, region in model.held()}
    return {name: Held(p, region_of(p)) for name, p in unwrapped(model).named_parameters()}


def trained_by(model: Any) -> dict[str, Held]:
    """What has gradients on this rank after backward: under ZeRO-1 and 2, its pieces in the optimizer."""
    if isinstance(model, ShardedDataParallel):
        return owned_pieces(model.module, model.optimizer)
    return held_by(model)


def owned_pieces(module: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Held]:
    """Of each parameter, what this rank steps."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {
        names[owned.parameter]: Held(owned.shard, owned_region(owned))
        for owned in optimizer.owned()
        if owned.parameter in names
    }


def owned_region(owned: OwnedPiece) -> Region:
    """What a piece of a flat bucket is of the model's own tensor."""
    return region_of(owned.parameter).part(owned.piece.inside.start, owned.piece.inside.stop)
