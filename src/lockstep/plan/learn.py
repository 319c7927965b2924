"""From runs that have been trained: how far predictions were, and a machine file that knows."""

from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any

from lockstep.config import Config, Train, load_config
from lockstep.config.check import LOW_BITS
from lockstep.config.load import MODELS, structure
from lockstep.config.trust import check_trusted
from lockstep.errors import UserError
from lockstep.plan.layout import PlanLayout, Recompute
from lockstep.plan.machine import Machine
from lockstep.plan.network import Network
from lockstep.plan.setting import Setting
from lockstep.plan.software import COMPILED, OURS
from lockstep.plan.step import step_time
from lockstep.results.metrics import read_metrics
from lockstep.results.record import Record
from lockstep.strange import json_of
from lockstep.strategies import STRATEGIES, degrees_of, strategy_named
from lockstep.strategies.pipeline import micro_batches_of


@dataclass
class Learned:
    """A run beside its prediction."""

    folder: Path
    setting: Setting
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s


def layout_of(config: Config, ranks: int) -> PlanLayout:
    """What `lockstep train` makes of a config at so many ranks."""
    parallel, train = config.parallel, config.train
    degrees = degrees_of(parallel, ranks)
    dp = degrees.replicate * degrees.shard
    micro_batches = train.accumulation if parallel.pp == 1 else micro_batches_of(parallel, train.accumulation)
    recompute: Recompute = train.recompute
    return PlanLayout(
        dp=dp,
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        ep=parallel.ep,
        expert_tp=parallel.tp if parallel.cut_experts else 0,
        zero=STRATEGIES[parallel.data].facts(parallel).zero_stage,
        shard=degrees.shard * degrees.cp if degrees.replicate > 1 and degrees.shard > 1 else 0,
        schedule=parallel.schedule if parallel.pp > 1 else "1f1b",
        chunks=2 if parallel.pp > 1 and parallel.schedule == "zb-v" else parallel.chunks,
        micro_batch=max(1, train.batch_size // (dp * micro_batches)),
        global_batch=train.batch_size,
        recompute=recompute,
        sequence=parallel.sequence,
        keep_gathered=parallel.keep_gathered,
    )


def optimizer_bytes(train: Train, network: Network) -> float:
    """Of the state of a parameter, in the mean: one moment of Muon's matrices, which are those of the blocks."""
    if train.optimizer == "sgd":
        of_state = 4.0 if train.momentum else 0.0
    elif train.optimizer == "muon":
        blocks = sum(layer.parameters * count for layer, count in network.layers)
        of_state = 8.0 - 4.0 * blocks / max(1, network.parameters)
    elif train.optimizer in LOW_BITS:
        of_state = LOW_BITS[train.optimizer] / 4
    else:
        of_state = 8.0
    return of_state + (4.0 if train.ema is not None else 0.0)


def setting_for(config: Config, network: Network, ranks: int, machine: Machine) -> Setting:
    software = COMPILED if config.train.compile != "none" else OURS
    software = replace(software, kept=replace(software.kept, optimizer=optimizer_bytes(config.train, network)))
    return Setting(network, layout_of(config, ranks), machine, software, config.train.precision)


def settings_of(record: Record, machine: Machine) -> list[tuple[dict[str, Any], Setting]]:
    """Of each row of a `lockstep bench train --json`: the row, and what the planner needs to predict it."""
    from lockstep.plan.trace import network_of_config, spec_without_data  # torch

    values = {name: {k.removesuffix("_"): v for k, v in part.items()} for name, part in record.config.items()}
    config = structure(values, MODELS[values["model"]["name"]], record.title)
    found = []
    for row in record.result["rows"]:
        strategy = row["strategy"].partition("@")[0]
        changed = replace(config, parallel=strategy_named(strategy, config.parallel))
        network = network_of_config(changed, spec_without_data(changed))
        found.append((row, setting_for(changed, network, row["ranks"], machine)))
    return found


def learned(folder: Path, machine: Machine) -> Learned:
    """What a run's folder says, beside what the planner would have said."""
    from lockstep.plan.trace import network_of_config, spec_without_data  # torch

    config = load_config(folder / "config.yaml")
    check_trusted(config, folder / "config.yaml", only=("model.import",))
    try:
        ranks = int(json_of(folder / "run.json")["result"]["ranks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is not the folder of a run of lockstep train ({error})") from None
    steps = [r for r in read_metrics(folder) if r.get("kind") == "train" and r.get("samples_per_s")]
    if len(steps) < 2:
        raise UserError(f"{folder} has fewer than two windows of steps; let it train longer, or log more often")
    setting = setting_for(config, network_of_config(config, spec_without_data(config)), ranks, machine)
    seconds = median(config.train.batch_size / r["samples_per_s"] for r in steps[1:])
    return Learned(folder, setting, seconds, step_time(setting).seconds)


def improved(machine: Machine, runs: list[Learned]) -> Machine:
    """The same machine, with the factor that makes these predictions right in the mean."""
    ratio = exp(mean(log(run.ratio) for run in runs))
    step = machine.factors.get("step", 1.0) * ratio
    sources = {**machine.sources, "step": f"lockstep plan learn, from {len(runs)} runs"}
    return replace(machine, factors={**machine.factors, "step": round(step, 4)}, sources=sources)
