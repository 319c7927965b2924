"""What theory expects of a config's steps."""

from dataclasses import replace

from lockstep.config import Config
from lockstep.data import Batch, DataSpec, Share, first_rows
from lockstep.models import on_meta
from lockstep.models.loss import loss_for
from lockstep.parallel.law import Sent, added
from lockstep.strategies import STRATEGIES, degrees_of, strategy_named
from lockstep.strategies.options import COMPUTE_DTYPES, DTYPES
from lockstep.strategies.traffic import FirstRank, traffic_by_axis


def named_config(config: Config, name: str) -> Config:
    """`config` with the strategy of that name, a backend after an @ left out."""
    return replace(config, parallel=strategy_named(name.partition("@")[0], config.parallel))


def averaging_cycle(config: Config) -> int:
    """After how many steps all have happened that happens in some steps only."""
    return STRATEGIES[config.parallel.data].facts(config.parallel).averages_every


def theory_of(config: Config, spec: DataSpec, ranks: int) -> Sent | None:
    """What a step that is taken should send, where there is a closed form.

    There is none with adapters, recomputation, running statistics, gradients that several micro-batches send, or where
    not all steps are alike.
    """
    train, engine = config.train, STRATEGIES[config.parallel.data]
    if config.lora.rank or train.recompute != "none" or averaging_cycle(config) > 1:
        return None
    if train.accumulation > 1 and engine.facts(config.parallel).sends_every_micro_batch:
        return None
    model = on_meta(config.model, spec).to(DTYPES[train.precision])
    if any(True for _ in model.buffers()):
        return None  # running statistics travel too
    parallel, compute = config.parallel, COMPUTE_DTYPES.get(train.precision)
    degrees = degrees_of(parallel, ranks)
    rows = Share(0, degrees.replicate * degrees.shard).of(train.batch_size)
    inputs = spec.inputs(rows.stop - rows.start)
    batch = Batch(inputs, first_rows(inputs))
    loss = loss_for(spec.kind, train.loss, spec.classes, train.z_loss)
    found = traffic_by_axis(model, FirstRank(degrees), parallel, loss, batch, train.accumulation, compute=compute)
    return added(found.values())
