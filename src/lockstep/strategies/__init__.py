"""Every way of spreading a step, ours and PyTorch's, behind one face. This table is all of them."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any, cast, get_args

from lockstep.comm.by_hand import ALGORITHM_NAMES
from lockstep.config import Parallel
from lockstep.config.schema import Sharding
from lockstep.errors import UserError
from lockstep.parallel.compression import COMPRESSIONS
from lockstep.strategies.base import Strategy
from lockstep.strategies.data_parallel import Bucketed, Flat, Naive, Overlap
from lockstep.strategies.ddp import DDP
from lockstep.strategies.deepspeed import DeepSpeed
from lockstep.strategies.fsdp import FSDP, Zero1Torch
from lockstep.strategies.local_sgd import LocalSGD
from lockstep.strategies.single import Single
from lockstep.strategies.step import StepOptions, StepResult
from lockstep.strategies.zero import Zero1, Zero2, Zero3
from lockstep.world import World

STRATEGIES: dict[str, type[Strategy]] = {
    "single": Single,
    "naive": Naive,
    "flat": Flat,
    "overlap": Overlap,
    "bucketed": Bucketed,
    "ddp": DDP,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "fsdp": FSDP,
    "zero1_torch": Zero1Torch,
    "deepspeed": DeepSpeed,
    "local_sgd": LocalSGD,
}

BY_HAND = ("naive", "flat", "overlap", "bucketed")
"""Those that take a compression and an all-reduce algorithm."""

VARIANTS = (
    *("bucketed+ring", "bucketed+bf16", "bucketed+fp16", "bucketed+topk", "bucketed+powersgd", "local_sgd+diloco"),
    *("zero3+SHARD_GRAD_OP", "fsdp+SHARD_GRAD_OP", "fsdp+HYBRID_SHARD", "fsdp+NO_SHARD"),
    *("deepspeed+zero1", "deepspeed+zero2"),
)
SHARDINGS = {"fsdp": get_args(Sharding), "zero3": ("FULL_SHARD", "SHARD_GRAD_OP")}
"""Options of a strategy that comparisons list as rows of their own."""


def strategy_named(
    name: str, parallel: Parallel | None = None, table: dict[str, type[Strategy]] = STRATEGIES
) -> Parallel:
    """`bucketed+topk` -> the Parallel section that asks for it, on top of `parallel`."""
    base, _, option = name.partition("+")
    if base not in table:
        raise UserError(f"strategy {name!r} does not exist; there are {', '.join([*STRATEGIES, *VARIANTS])}")
    chosen = replace(parallel or Parallel(), data=base)
    if not option:
        return chosen
    if option in SHARDINGS.get(base, ()):
        return replace(chosen, sharding=cast(Any, option))
    if base == "deepspeed" and option in ("zero1", "zero2", "zero3"):
        return replace(chosen, zero_stage=cast(Any, int(option[-1])))
    if option == "diloco" and base == "local_sgd":
        return replace(chosen, outer_lr=chosen.outer_lr or 0.7)
    if option in COMPRESSIONS and base in BY_HAND:
        return replace(chosen, compression=cast(Any, option))
    if option in ALGORITHM_NAMES and base in BY_HAND:
        return replace(chosen, algorithm=option)
    raise UserError(
        f"strategy {name!r} does not exist; options of a strategy are {', '.join(VARIANTS)}, "
        f"and an all-reduce algorithm, as in bucketed+ring ({', '.join(ALGORITHM_NAMES)})"
    )


def available_strategies() -> list[str]:
    """Every strategy and variant, but for those that need a package that is not installed."""
    found = find_spec("deepspeed") is not None
    return [name for name in (*STRATEGIES, *VARIANTS) if found or not name.startswith("deepspeed")]


def strategy_names(wanted: tuple[str, ...] | list[str]) -> list[str]:
    """`all` stands for every strategy and variant that can run here."""
    names = [n for word in wanted for n in (available_strategies() if word == "all" else [word])]
    for name in names:
        strategy_named(name)
    return list(dict.fromkeys(names))


def make_strategy(world: World, parallel: Parallel, options: StepOptions) -> Strategy:
    if parallel.data not in STRATEGIES:
        raise UserError(f"parallel.data is {parallel.data!r}, but it must be one of {', '.join(STRATEGIES)}")
    for option, neutral in (("compression", "none"), ("algorithm", "native")):
        chosen = getattr(parallel, option)
        if chosen != neutral and parallel.data not in BY_HAND:
            raise UserError(
                f"parallel.{option} {chosen} does not go with parallel.data {parallel.data}; use {', '.join(BY_HAND)}"
            )
    check_sharding(world, parallel)
    return STRATEGIES[parallel.data](world, parallel, options)


OFFLOADS = {"zero1": ("cpu",), "zero2": ("cpu",), "zero3": ("cpu",), "fsdp": ("cpu",), "deepspeed": ("cpu", "nvme")}


def check_sharding(world: World, parallel: Parallel) -> None:
    """Refuse what a strategy does not have, with the reason."""
    data, offload = parallel.data, parallel.offload
    if parallel.sharding not in SHARDINGS.get(data, ("FULL_SHARD",)):
        who = ", ".join(name for name, known in SHARDINGS.items() if parallel.sharding in known)
        raise UserError(f"parallel.sharding {parallel.sharding} does not go with parallel.data {data}; use {who}")
    if offload != "none" and offload not in OFFLOADS.get(data, ()):
        who = ", ".join(name for name, known in OFFLOADS.items() if offload in known)
        raise UserError(f"parallel.offload {offload} does not go with parallel.data {data}; use {who}")
    if offload == "cpu" and world.device.type == "cpu" and data != "deepspeed":
        raise UserError(
            "parallel.offload cpu moves what a GPU does not need at the moment to the host, and these ranks compute on "
            "the host already; leave it out"
        )
    if parallel.deepspeed_config is not None and data != "deepspeed":
        raise UserError(f"parallel.deepspeed_config goes with parallel.data deepspeed, and this is {data}")


__all__ = [
    "STRATEGIES",
    "VARIANTS",
    "StepOptions",
    "StepResult",
    "Strategy",
    "available_strategies",
    "make_strategy",
    "strategy_named",
    "strategy_names",
]
