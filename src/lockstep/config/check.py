"""Ranges: what a type cannot say about a value."""

from typing import Any

from lockstep.config.schema import Config
from lockstep.errors import UserError

# key -> (smallest allowed value, largest allowed value); None: no bound.
RANGES: dict[str, tuple[float, float | None]] = {
    "model.layers": (1, None),
    "model.width": (1, None),
    "model.channels": (1, None),
    "model.hidden": (1, None),
    "model.d_model": (1, None),
    "model.heads": (1, None),
    "model.kv_heads": (1, None),
    "model.context": (1, None),
    "model.vocabulary": (2, None),
    "model.dropout": (0, 0.99),
    "data.samples": (1, None),
    "data.shape": (1, None),
    "data.classes": (1, None),
    "data.max_bytes": (1, None),
    "train.epochs": (1, None),
    "train.steps": (1, None),
    "train.batch_size": (1, None),
    "train.accumulation": (1, None),
    "train.lr": (0, None),
    "train.momentum": (0, 1),
    "train.weight_decay": (0, None),
    "train.warmup_steps": (0, None),
    "train.clip_norm": (0, None),
    "train.evaluate_every": (0, None),
    "train.log_every": (1, None),
    "train.recompute_every": (1, None),
    "lora.rank": (0, None),
    "lora.alpha": (0, None),
    "checkpoint.every": (0, None),
    "checkpoint.keep_last": (0, None),
    "parallel.bucket_mb": (0, None),
    "parallel.shard_size": (1, None),
    "parallel.prefetch": (0, None),
    "parallel.topk_ratio": (1e-9, 1),
    "parallel.powersgd_rank": (1, None),
    "parallel.sync_every": (1, None),
    "parallel.outer_lr": (0, None),
    "parallel.outer_momentum": (0, 1),
}


def check_ranges(config: Config) -> None:
    """Refuse values that no run can use, naming the key and the range."""
    for key, (low, high) in RANGES.items():
        section, name = key.split(".")
        value: Any = getattr(getattr(config, section), name, None)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not (low <= number and (high is None or number <= high)):
                allowed = f"{low:g} or more" if high is None else f"from {low:g} to {high:g}"
                raise UserError(f"{key} is {value}, but it must be {allowed}")
