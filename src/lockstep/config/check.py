"""Ranges: what a type cannot say about a value."""

import dataclasses
from math import inf
from typing import Any

from lockstep.config.own import is_import
from lockstep.config.schema import Config, Train
from lockstep.errors import UserError

WIDTH, COUNT, AMOUNT = 10_000_000, 10**12, 1e9
"""Bounds that nobody needs and a slip of the finger exceeds: of a layer's sizes, of what is counted, of the rest."""

# key -> (smallest allowed value, largest allowed value)
RANGES: dict[str, tuple[float, float]] = {
    "model.layers": (1, 100_000),
    "model.width": (1, WIDTH),
    "model.depth": (8, 10_000),
    "model.stages": (1, 10_000),
    "model.channels": (1, WIDTH),
    "model.hidden": (1, WIDTH),
    "model.d_model": (1, WIDTH),
    "model.heads": (1, WIDTH),
    "model.kv_heads": (1, WIDTH),
    "model.context": (1, 1_000_000_000),
    "model.vocabulary": (2, 1_000_000_000),
    "model.dropout": (0, 0.99),
    "data.samples": (1, COUNT),
    "data.shape": (1, WIDTH),
    "data.classes": (1, WIDTH),
    "data.max_bytes": (1, COUNT),
    "data.workers": (0, 1024),
    "train.epochs": (1, COUNT),
    "train.steps": (1, COUNT),
    "train.batch_size": (1, COUNT),
    "train.batch_per_rank": (1, COUNT),
    "train.evaluate_steps": (1, COUNT),
    "train.evaluate_batches": (1, COUNT),
    "train.patience": (1, COUNT),
    "train.accumulation": (1, COUNT),
    "train.lr": (0, 1e6),
    "train.momentum": (0, 1),
    "train.betas": (0, 0.999999999),
    "train.weight_decay": (0, 1e6),
    "train.warmup_steps": (0, COUNT),
    "train.lr_decay": (0, 1e6),
    "train.lr_milestones": (0, 1),
    "train.clip_norm": (1e-12, AMOUNT),
    "train.evaluate_every": (0, COUNT),
    "train.straggler": (0, AMOUNT),
    "train.check_replicas": (0, COUNT),
    "train.log_every": (1, COUNT),
    "train.recompute_every": (1, COUNT),
    "train.seed": (0, 10**12),
    "lora.rank": (0, WIDTH),
    "lora.alpha": (0, AMOUNT),
    "checkpoint.every": (0, COUNT),
    "checkpoint.every_seconds": (0.1, AMOUNT),
    "checkpoint.in_memory": (0, COUNT),
    "checkpoint.keep_last": (0, COUNT),
    "parallel.bucket_mb": (0, AMOUNT),
    "parallel.shard_size": (1, COUNT),
    "parallel.replicate": (-1, COUNT),
    "parallel.shard": (-1, COUNT),
    "parallel.pp": (1, COUNT),
    "parallel.cp": (1, COUNT),
    "parallel.tp": (1, COUNT),
    "parallel.micro_batches": (1, COUNT),
    "parallel.chunks": (1, COUNT),
    "parallel.prefetch": (0, COUNT),
    "parallel.topk_ratio": (1e-9, 1),
    "parallel.powersgd_rank": (1, WIDTH),
    "parallel.sync_every": (1, COUNT),
    "parallel.outer_lr": (0, 1e6),
    "parallel.outer_momentum": (0, 1),
}


def check_ranges(config: Config) -> None:
    """Refuse values that no run can use, naming the key and the range."""
    for key in RANGES:
        section, name = key.split(".")
        value: Any = getattr(getattr(config, section), name, None)
        for number in value if isinstance(value, tuple) else (value,):
            check_range(key, number, value)
    check_names(config)
    for degree in ("replicate", "shard"):
        if getattr(config.parallel, degree) == 0:
            raise UserError(f"parallel.{degree} is 0, but it must be 1 or more, or -1 for the rest of the ranks")
    for section, values in dataclasses.asdict(config).items():
        for name, value in values.items():
            if isinstance(value, str) and "\0" in value:
                raise UserError(f"{section}.{name} has a NUL character in it, which no name may have")


def check_range(key: str, number: float | None, value: Any) -> None:
    """Of one number of a key's `value`."""
    low, high = RANGES.get(key, (-inf, inf))
    if number is not None and not low <= number <= high and key in RANGES:  # NaN is in no range
        raise UserError(f"{key} is {_shortly(value)}, but it must be {_allowed(number, low, high)}")


OPTIMIZERS, SCHEDULES = ("sgd", "adam", "adamw"), ("constant", "cosine", "step")


def check_names(config: Config) -> None:
    """What is one of some names, or stands in a module of the user's."""
    check_choices(config.train)
    for section, own in (("model", config.model), ("data", config.data)):
        if own.name == "own" and own.import_ is None:
            raise UserError(f"{section}.name own needs {section}.import, as my_package.module:object")


def check_choices(train: Train) -> None:
    for key, value, names in (
        ("train.optimizer", train.optimizer, OPTIMIZERS),
        ("train.schedule", train.schedule, SCHEDULES),
    ):
        if value not in names and not is_import(value):
            raise UserError(f"{key} is {value!r}, but it must be one of {', '.join(names)}, or package.module:object")
    for callback in train.callbacks:
        if not is_import(callback):
            raise UserError(f"train.callbacks has {callback!r}, but each must be package.module:function")
    if train.loss is not None and not is_import(train.loss):
        raise UserError(f"train.loss is {train.loss!r}, but it must be package.module:function")


def _allowed(number: float, low: float, high: float) -> str:
    """The range in words; of a bound that is only there for slips, nothing to whoever is below the other."""
    if number < low and high >= WIDTH:
        return f"{low:g} or more"
    return f"from {low:g} to {high:,.0f}" if high >= 1000 else f"from {low:g} to {high:g}"


def _shortly(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
