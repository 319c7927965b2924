"""DeepSpeed's own settings: from our config, or from the user's JSON file with what our config decides filled in."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.config import Parallel
from lockstep.config.shipped import find_config
from lockstep.errors import UserError
from lockstep.strange import json_of
from lockstep.strategies.options import Options


def zero_settings(stage: int, offload: str, nvme_path: str) -> dict[str, Any]:
    """The `zero_optimization` section; `configs/deepspeed/` has the same as files."""
    zero: dict[str, Any] = {"stage": stage}
    if offload != "none":
        place: dict[str, Any] = {"device": offload}
        if offload == "nvme":
            place["nvme_path"] = nvme_path
        zero["offload_optimizer"] = dict(place)
        if stage == 3:
            zero["offload_param"] = dict(place)
    return zero


def deepspeed_settings(parallel: Parallel, options: Options) -> dict[str, Any]:
    """The engine's config: the user's file, if any, with everything that our config decides filled in."""
    ours = our_fields(options)
    if parallel.deepspeed_config is None:
        settings = {"zero_optimization": zero_settings(parallel.zero_stage, parallel.offload, parallel.nvme_path)}
    else:
        settings = read_settings(Path(parallel.deepspeed_config))
        refuse_contradictions(settings, ours, parallel.deepspeed_config)
    settings = {k: v for k, v in settings.items() if k not in ("optimizer", "scheduler", *BATCH_FIELDS)}
    zero = settings.setdefault("zero_optimization", {"stage": 0})
    check_offload(zero)
    return {
        **settings,
        # Micro-batches may differ in size here, and are weighted by us: DeepSpeed only counts them.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": options.clip_norm or 0.0,
        "bf16": {"enabled": options.precision == "bf16"},
        "fp16": {"enabled": options.precision == "fp16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


BATCH_FIELDS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def our_fields(options: Options) -> dict[str, tuple[str, Any]]:
    """DeepSpeed's field -> (our key, our value)."""
    fields: dict[str, tuple[str, Any]] = {
        "gradient_accumulation_steps": ("train.accumulation", options.accumulation),
        "gradient_clipping": ("train.clip_norm", options.clip_norm or 0.0),
        "bf16.enabled": ("train.precision", options.precision == "bf16"),
        "fp16.enabled": ("train.precision", options.precision == "fp16"),
    }
    if options.batch_size is not None:
        fields["train_batch_size"] = ("train.batch_size", options.batch_size)
    return fields


def refuse_contradictions(settings: dict[str, Any], ours: dict[str, tuple[str, Any]], file: str) -> None:
    for field, (key, value) in ours.items():
        section, _, name = field.rpartition(".")
        given = (settings.get(section, {}) if section else settings).get(name, "auto")
        if given != "auto" and given != value:
            raise UserError(
                f"{file}: {field} is {json.dumps(given)}, but {key} means {json.dumps(value)}; make them agree, or "
                f"write auto in the file"
            )
    micro = settings.get("train_micro_batch_size_per_gpu", "auto")
    if micro != "auto" and "train_batch_size" in ours:
        _, batch = ours["train_batch_size"]
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        expected = batch / ranks / ours["gradient_accumulation_steps"][1]
        if micro != expected:
            raise UserError(
                f"{file}: train_micro_batch_size_per_gpu is {micro}, but train.batch_size {batch} over {ranks} ranks "
                f"and {ours['gradient_accumulation_steps'][1]} micro-batches gives {expected:g}; make them agree, or "
                f"write auto in the file"
            )
    if settings.get("optimizer") or settings.get("scheduler"):
        section = "optimizer" if settings.get("optimizer") else "scheduler"
        raise UserError(
            f"{file}: has a section {section}, but train.optimizer, train.lr and train.schedule decide that here; "
            f"take it out of the file"
        )


def read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json_of(find_config(file))
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}); ready ones: deepspeed/zero2.json and others"
        ) from None
    except ValueError as error:
        raise UserError(f"{file}: is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{file}: holds {type(settings).__name__}, but it must hold an object")
    return settings


def check_offload(zero: dict[str, Any]) -> None:
    places = {zero.get(part, {}).get("device") for part in ("offload_optimizer", "offload_param")}
    if "nvme" in places:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise UserError(
                "offload nvme needs the libaio headers: apt install libaio-dev, or dnf install libaio-devel"
            )
    if "offload_param" in zero and zero.get("stage") != 3:
        raise UserError("DeepSpeed offloads parameters in stage 3 only; set parallel.zero_stage 3")
