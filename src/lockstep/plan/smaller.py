"""What a run that ran out of memory would hold if one thing were changed, by the planner's formulas."""

from collections.abc import Iterator
from dataclasses import replace

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.plan.learn import layout_of, setting_for
from lockstep.plan.machine import machine_of
from lockstep.plan.memory import GIB, memory_of
from lockstep.plan.trace import network_of_config, spec_without_data
from lockstep.strategies import STRATEGIES, degrees_of


def changes(config: Config, ranks: int) -> Iterator[tuple[str, Config]]:
    """Flags, and the config with them."""
    train, parallel = config.train, config.parallel
    degrees = degrees_of(parallel, ranks)
    each = train.batch_size // (degrees.replicate * degrees.shard)
    if parallel.pp > 1:
        more = 2 * layout_of(config, ranks).micro_batches
        if each >= more:
            yield f"--parallel.micro-batches {more}", replace(config, parallel=replace(parallel, micro_batches=more))
    elif each >= 2 * train.accumulation:
        twice = 2 * train.accumulation
        yield f"--train.accumulation {twice}", replace(config, train=replace(train, accumulation=twice))
    if train.recompute != "full":
        yield "--train.recompute full", replace(config, train=replace(train, recompute="full"))
    engine = STRATEGIES[parallel.data].facts(parallel).smaller if degrees.replicate * degrees.shard > 1 else None
    while engine is not None:
        changed = replace(parallel, data=engine)
        yield f"--parallel.data {engine}", replace(config, parallel=changed)
        engine = STRATEGIES[engine].facts(changed).smaller


def smaller(config: Config, ranks: int, on_gpu: bool) -> str | None:
    """One line: GiB of a rank as it is, and with each change; None where the formulas do not know the model."""
    machine = machine_of("h200" if on_gpu else "cpu")  # only that it is a GPU matters: bytes are the same on each

    def held(changed: Config) -> float:
        network = network_of_config(changed, spec_without_data(changed))
        return memory_of(setting_for(changed, network, ranks, machine)).total / GIB

    try:
        now = held(config)
        found = [(flags, held(changed)) for flags, changed in changes(config, ranks)]
    except UserError:
        return None
    less = ", ".join(f"{flags}: {gib:.2f}" for flags, gib in found if gib < now)
    return f"by the planner's formulas a rank holds {now:.2f} GiB at its peak; with {less}" if less else None
