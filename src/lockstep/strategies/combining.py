"""What cannot be cut as asked for, refused before any rank starts."""

import torch
from torch import Tensor, nn

from lockstep.config import Config, Fp8, Parallel, Train
from lockstep.config.check import LOW_BITS
from lockstep.data import Inputs
from lockstep.errors import UserError
from lockstep.models.float8 import UNITS, has_units
from lockstep.parallel.pipeline.schedule import check_schedule
from lockstep.parallel.pipeline.stage import layers_of
from lockstep.strategies.context import check_context
from lockstep.strategies.experts import check_expert_axis
from lockstep.strategies.native_context import CHUNK
from lockstep.strategies.native_pipeline import check_native_pipeline
from lockstep.strategies.native_tensor import check_native_tensor
from lockstep.strategies.pipeline import micro_batches_of, placement_for
from lockstep.strategies.table import STRATEGIES
from lockstep.strategies.tensor import check_tensor


def check_inputs(inputs: Inputs, parallel: Parallel) -> None:
    """A pipeline sends one tensor to its first stage, and context parallelism cuts one along its positions."""
    for axis, degree in (("pp", parallel.pp), ("cp", parallel.cp)):
        if degree > 1 and inputs is not None and not isinstance(inputs, Tensor):
            raise UserError(
                f"parallel.{axis} is {degree}, and the model is given several inputs, where {axis} takes one; "
                f"use a data engine or parallel.tp"
            )


def check_optimizer(train: Train, parallel: Parallel) -> None:
    """What is asked of the optimizer's step, and the strategy does not have."""
    averaging = "train.ema" if train.ema is not None else "train.optimizer schedule_free"
    for said, is_asked, can in (
        (averaging, train.ema is not None or train.optimizer == "schedule_free", "averages_weights"),
        (f"train.optimizer {train.optimizer}", train.optimizer in LOW_BITS, "keeps_any_state"),
        ("train.clip_value", train.clip_value is not None, "clips_elements"),
    ):
        if is_asked and not getattr(STRATEGIES[parallel.data], can):
            who = ", ".join(name for name, engine in STRATEGIES.items() if getattr(engine, can))
            raise UserError(f"{said} does not go with parallel.data {parallel.data}; use {who}")


def check_signs(train: Train, parallel: Parallel) -> None:
    """DeMo's gradients are signs already."""
    if parallel.compression != "demo":
        return
    plain = train.optimizer == "sgd" and train.momentum == 0 and train.clip_norm is None
    if not plain:
        raise UserError(
            "parallel.compression demo steps by signs, whose norm says nothing, and has the momentum itself; give "
            "--train.optimizer sgd --train.momentum 0, and no train.clip_norm"
        )


def check_float8(config: Config, device: str) -> None:
    """Refuse axes and adapters that FP8 cannot have, and GPUs without units for it."""
    if config.train.precision != "fp8":
        if config.fp8 != Fp8():
            raise UserError(
                f"fp8.scaling {config.fp8.scaling} is for train.precision fp8, and that is {config.train.precision}; "
                f"leave one out"
            )
        return
    if config.parallel.tp > 1:
        raise UserError(
            f"train.precision fp8 does not go with parallel.tp {config.parallel.tp}: the parts of a layer would round "
            f"by other scales; use bf16, or another axis"
        )
    if config.lora.rank > 0:
        raise UserError("train.precision fp8 does not go with lora: layers with adapters multiply in bf16; use bf16")
    if device == "cuda" and not has_units(torch.device("cuda")):
        raise UserError(
            f"train.precision fp8 needs a GPU of compute capability {'.'.join(map(str, UNITS))} or newer (L40S, H100, "
            f"B200), and {torch.cuda.get_device_name()} has "
            f"{'.'.join(map(str, torch.cuda.get_device_capability()))}; use bf16"
        )


def check_cuts(model: nn.Module, parallel: Parallel, accumulation: int) -> None:
    """Sizes that degrees do not divide, fewer layers than stages, micro-batches that do not fit a schedule. `model` may
    be on the meta device.
    """
    micro_batches = accumulation if parallel.pp == 1 else micro_batches_of(parallel, accumulation)
    taken = [name for name, engine in STRATEGIES.items() if engine.takes_experts]
    check_expert_axis(model, parallel, micro_batches, parallel.data in taken, ", ".join(taken))
    check_tensor(model, parallel.tp, parallel.sequence)
    if "tp" in parallel.native and parallel.tp > 1:
        check_native_tensor(model, parallel.tp)
    multiple = CHUNK if "cp" in parallel.native else 1
    check_context(model, parallel.cp, parallel.attention, parallel.tp, multiple)
    for stage in parallel.recompute_stages:
        if not 0 <= stage < parallel.pp:
            there = "there is no pipeline" if parallel.pp == 1 else f"there are 0 to {parallel.pp - 1}"
            raise UserError(f"parallel.recompute_stages has stage {stage}, and {there}; change it, or parallel.pp")
    if parallel.pp == 1:
        return
    if "pp" in parallel.native:
        check_native_pipeline(parallel, micro_batches_of(parallel, accumulation))
    check_schedule(parallel.schedule, parallel.pp, micro_batches_of(parallel, accumulation), parallel.chunks)
    layers, parts = len(layers_of(model)), placement_for(parallel).parts
    if layers < parts:
        raise UserError(
            f"parallel.pp {parallel.pp} with {parallel.schedule} cuts the model into {parts} parts, and it has "
            f"{layers} layers (embedding and head included); use fewer stages or chunks, or more model.layers"
        )
