"""The table of all strategies, ours and PyTorch's."""

from dataclasses import replace
from importlib.util import find_spec
from math import prod

from lockstep.comm.by_hand import ALGORITHM_NAMES
from lockstep.config import Parallel
from lockstep.errors import UserError
from lockstep.layout import Degrees
from lockstep.parallel.law import Sent, added
from lockstep.strategies.axes import model_degrees, with_axes
from lockstep.strategies.data_parallel import HandWritten
from lockstep.strategies.ddp import DDP
from lockstep.strategies.deepspeed import DeepSpeed
from lockstep.strategies.engine import Engine
from lockstep.strategies.experts import check_fold
from lockstep.strategies.fsdp import FSDP
from lockstep.strategies.fully_sharded import FullySharded
from lockstep.strategies.local_sgd import LocalSGD
from lockstep.strategies.model_sizes import ModelSizes
from lockstep.strategies.native_context import check_native_context
from lockstep.strategies.sharded import ShardedState
from lockstep.strategies.single import Single
from lockstep.strategies.zero1_torch import Zero1Torch

Table = dict[str, type[Engine]]

STRATEGIES: Table = {
    "single": Single,
    "naive": HandWritten,
    "flat": HandWritten,
    "overlap": HandWritten,
    "bucketed": HandWritten,
    "ddp": DDP,
    "zero1": ShardedState,
    "zero2": ShardedState,
    "zero3": FullySharded,
    "fsdp": FSDP,
    "zero1_torch": Zero1Torch,
    "deepspeed": DeepSpeed,
    "local_sgd": LocalSGD,
}

OF_BUCKETED = ("ring", "bf16", "fp16", "int8", "1bit", "topk", "powersgd")
"""Options that naive, flat and overlap take too; comparisons list them only for bucketed. (demo goes with one optimizer
only.)"""
VARIANTS = (
    *(f"bucketed+{option}" for option in OF_BUCKETED),
    *(f"{name}+{option}" for name, engine in STRATEGIES.items() for option in engine.variants),
)
"""Options of a strategy that comparisons list as rows of their own."""


def engine_named(data: str, table: Table = STRATEGIES) -> type[Engine]:
    if data not in table:
        raise UserError(f"parallel.data is {data!r}, but it must be one of {', '.join(STRATEGIES)}")
    return table[data]


def strategy_named(name: str, parallel: Parallel | None = None, table: Table = STRATEGIES) -> Parallel:
    """`bucketed+topk`, `zero3,tp=2` -> the Parallel section that asks for it, on top of `parallel`."""
    data, *axes = name.split(",")
    return with_axes(_data_named(data, parallel, table), axes, name)


def _data_named(name: str, parallel: Parallel | None, table: Table) -> Parallel:
    base, _, option = name.partition("+")
    if base not in table:
        raise UserError(f"strategy {name!r} does not exist; there are {', '.join([*STRATEGIES, *VARIANTS])}")
    chosen = replace(parallel or Parallel(), data=base)
    found = table[base].variant(chosen, option) if option else chosen
    if found is None:
        raise UserError(
            f"strategy {name!r} does not exist; options of a strategy are {', '.join(VARIANTS)}, "
            f"and an all-reduce algorithm, as in bucketed+ring ({', '.join(ALGORITHM_NAMES)})"
        )
    return found


def available_strategies() -> list[str]:
    """Every strategy and variant, but for those that need a package that is not installed."""
    missing = {name for name, e in STRATEGIES.items() if e.package is not None and find_spec(e.package) is None}
    return [name for name in (*STRATEGIES, *VARIANTS) if name.partition("+")[0] not in missing]


def degrees_of(parallel: Parallel, ranks: int, table: Table = STRATEGIES) -> Degrees:
    """The degrees that `parallel` asks for: the model axes as given, the rest of the ranks as the engine decides."""
    axes = model_degrees(parallel)
    product = prod(axes.values())
    if ranks % product:
        said = " x ".join(f"{axis}={degree}" for axis, degree in axes.items() if degree > 1)
        raise UserError(
            f"{said} does not divide the {ranks} ranks; start a multiple of {product}, or give other degrees"
        )
    data = engine_named(parallel.data, table).degrees(parallel, ranks // product)
    found = replace(data, **axes) if product == 1 else replace(data, **axes).resolve(ranks)
    check_fold(parallel, found)
    return found


def strategy_names(wanted: tuple[str, ...] | list[str]) -> list[str]:
    """`all` stands for every strategy and variant that can run here."""
    names = [n for word in wanted for n in (available_strategies() if word == "all" else [word])]
    for name in names:
        strategy_named(name)
    return list(dict.fromkeys(names))


def expected_traffic(sizes: ModelSizes, parallel: Parallel, ranks: int, table: Table = STRATEGIES) -> Sent | None:
    """What theory says about one step; None where there is no closed form (yet)."""
    if sizes.parts and parallel.sharding == "HYBRID_SHARD":
        return None
    parts = [(ranks, sizes), *sizes.parts.items()]
    return added(table[parallel.data].traffic(part, parallel, n) for n, part in parts if n > 1)


def strategy_dividing(zero_stage: int, cuts_model: bool) -> str:
    """The planner's choice among strategies that divide as much."""
    wanted = ("always",) if cuts_model else ("alone", "always")
    for how in wanted:
        for name, engine in STRATEGIES.items():
            facts = engine.facts(Parallel(data=name))
            if facts.planned == how and facts.zero_stage == zero_stage:
                return name
    raise ValueError(f"no strategy divides as ZeRO's stage {zero_stage}")


def hybrid_strategy() -> str:
    """The strategy that shards over some ranks and replicates over the others."""
    return next(name for name, engine in STRATEGIES.items() if "HYBRID_SHARD" in engine.shardings)


# ---- what does not go together -------------------------------------------------------------------------------------


def check_parallel(parallel: Parallel, device: str, precision: str, compiled: bool, table: Table = STRATEGIES) -> None:
    """Refuse what a strategy does not have, with the reason; before any rank starts, where the config is known."""
    data, offload = parallel.data, parallel.offload
    engine = engine_named(data, table)
    for axis, degree in model_degrees(parallel).items():
        if degree > 1 and axis not in engine.model_axes:
            who = ", ".join(name for name, other in STRATEGIES.items() if axis in other.model_axes)
            raise UserError(f"parallel.{axis} {degree} does not go with parallel.data {data}; use {who}")
    for axis in parallel.native:
        if getattr(parallel, axis) == 1:
            raise UserError(f"parallel.native {axis} says how parallel.{axis} is cut, and that is 1; leave one out")
        if axis not in engine.native_axes:
            who = " or ".join(name for name, other in STRATEGIES.items() if axis in other.native_axes)
            raise UserError(
                f"{axis}={getattr(parallel, axis)}:native goes with parallel.data {who}, and this is {data}"
            )
    if "tp" in parallel.native and parallel.tp > 1 and parallel.pp > 1:
        raise UserError("tp=...:native does not go with pp; leave native out")
    if "cp" in parallel.native:
        check_native_context(parallel.attention, device, precision, compiled, parallel.pp)
    if parallel.sequence and parallel.tp == 1:
        raise UserError("parallel.sequence cuts what lies between matrices that parallel.tp cuts, and that is 1")
    if parallel.keep_gathered and "tp" in parallel.native:
        raise UserError(
            "parallel.keep_gathered is about our own cut layers, and tp=...:native has DTensor's; leave one out"
        )
    if parallel.keep_gathered and not parallel.sequence:
        raise UserError(
            "parallel.keep_gathered is about what parallel.sequence gathers, and that is off; leave one out"
        )
    if parallel.reshard_micro_batches and (parallel.pp == 1 or not engine.reshards_micro_batches):
        who = ", ".join(name for name, other in STRATEGIES.items() if other.reshards_micro_batches)
        raise UserError(
            f"parallel.reshard_micro_batches is about {who} in a pipeline, and this is {data} with pp {parallel.pp}; "
            f"leave it out"
        )
    for option, neutral in (("compression", "none"), ("algorithm", "native")):
        chosen = getattr(parallel, option)
        if chosen != neutral and not engine.takes_compression:
            who = ", ".join(name for name, other in STRATEGIES.items() if other.takes_compression)
            raise UserError(f"parallel.{option} {chosen} does not go with parallel.data {data}; use {who}")
    usual = Parallel()
    for option in ("fragments", "outer_delay", "outer_bits", "outer_density", "gossip"):
        if getattr(parallel, option) != getattr(usual, option) and not issubclass(engine, LocalSGD):
            raise UserError(f"parallel.{option} goes with parallel.data local_sgd, and this is {data}; leave it out")
    if parallel.sharding not in engine.shardings:
        who = ", ".join(name for name, other in STRATEGIES.items() if parallel.sharding in other.shardings)
        raise UserError(f"parallel.sharding {parallel.sharding} does not go with parallel.data {data}; use {who}")
    if offload != "none" and offload not in engine.offloads:
        who = ", ".join(name for name, other in STRATEGIES.items() if offload in other.offloads)
        raise UserError(f"parallel.offload {offload} does not go with parallel.data {data}; use {who}")
    if offload == "cpu" and device == "cpu" and not engine.offloads_from_cpu:
        raise UserError(
            "parallel.offload cpu moves what a GPU does not need at the moment to the host, and these ranks compute on "
            "the host already; leave it out"
        )
    if parallel.deepspeed_config is not None and not engine.takes_user_config:
        who = ", ".join(name for name, other in STRATEGIES.items() if other.takes_user_config)
        raise UserError(f"parallel.deepspeed_config goes with parallel.data {who}, and this is {data}")
    engine.check(parallel, precision, compiled)
