"""What theory expects of a config's steps."""

from dataclasses import replace

import torch

from lockstep.config import Config
from lockstep.data import DataSpec
from lockstep.layout import Group
from lockstep.models import build_model
from lockstep.models.loss import loss_for
from lockstep.strategies import STRATEGIES, expected_traffic, strategy_named
from lockstep.strategies.options import COMPUTE_DTYPES, DTYPES
from lockstep.strategies.tensor import activation_traffic, cut_tensors
from lockstep.strategies.theory import ModelSizes, Theory, added


def named_config(config: Config, name: str) -> Config:
    """`config` with the strategy of that name, a backend after an @ left out."""
    return replace(config, parallel=strategy_named(name.partition("@")[0], config.parallel))


def meeting_cycle(config: Config) -> int:
    """After how many steps all have happened that happens in some steps only."""
    return STRATEGIES[config.parallel.data].meets_every(config.parallel)


def theory_of(config: Config, spec: DataSpec, ranks: int) -> Theory | None:
    """What a step that is taken should send, where there is a closed form.

    There is none with adapters, recomputation, running statistics, gradients that several micro-batches send, or where
    not all steps are alike.
    """
    train, engine = config.train, STRATEGIES[config.parallel.data]
    if config.lora.rank or train.recompute != "none" or meeting_cycle(config) > 1:
        return None
    if train.accumulation > 1 and engine.sends_every_micro_batch(config.parallel):
        return None
    with torch.device("meta"):
        model = build_model(config.model, spec).to(DTYPES[train.precision])
    if any(True for _ in model.buffers()):
        return None  # running statistics travel too
    parallel, loss, compute = config.parallel, loss_for(spec.kind), COMPUTE_DTYPES.get(train.precision)
    cut_tensors(model, Group("tp", 0, parallel.tp), parallel.sequence, loss)
    data_ranks, positions = ranks // parallel.tp, spec.shape[0]
    data = expected_traffic(ModelSizes.of(model, compute, parallel.reduce_dtype), parallel, data_ranks)
    if parallel.tp == 1:
        return data
    if compute is not None or train.batch_size % (data_ranks * train.accumulation):
        return None  # activations are in several dtypes, or ranks have different numbers of samples
    tokens = train.batch_size // (data_ranks * train.accumulation) * (positions if spec.kind == "tokens" else 1)
    tensor = activation_traffic(model, parallel.tp, parallel.sequence, loss, tokens, positions)
    return added([data, *[tensor] * train.accumulation])
