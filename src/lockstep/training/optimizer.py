"""Optimizers and learning-rate schedules."""

from collections.abc import Iterable
from functools import partial
from math import cos, inf, pi
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import Train
from lockstep.config.check import LOW_BITS
from lockstep.config.user_code import called, imported, is_import, only_taken, where_and_what
from lockstep.errors import UserError
from lockstep.parallel.optimizer.low_bit import LowBitAdamW
from lockstep.parallel.optimizer.muon import Muon
from lockstep.parallel.optimizer.schedule_free import ScheduleFreeAdamW


def build_optimizer(train: Train, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = of_one_mesh_each(list(parameters)) or [nn.Parameter(torch.empty(0))]  # torch refuses an empty list
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, train.lr, train.momentum, weight_decay=train.weight_decay)
    if is_import(train.optimizer):
        return user_optimizer(train, parameters)
    fused = should_fuse(parameters) or None  # None: PyTorch's own default
    if train.optimizer == "muon":
        decay, momentum = train.weight_decay, train.muon_momentum
        return Muon(parameters, train.lr, train.betas, weight_decay=decay, momentum=momentum, fused=fused)
    if train.optimizer in LOW_BITS:
        bits = LOW_BITS[train.optimizer]
        return LowBitAdamW(parameters, train.lr, train.betas, weight_decay=train.weight_decay, bits=bits)
    if train.optimizer == "schedule_free":
        return ScheduleFreeAdamW(parameters, train.lr, train.betas, weight_decay=train.weight_decay)
    cls = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    return cls(parameters, train.lr, train.betas, weight_decay=train.weight_decay, fused=fused)


def user_optimizer(train: Train, parameters: list[Any]) -> torch.optim.Optimizer:
    """It is given what it has a parameter for of lr, momentum, betas and weight_decay."""
    make = imported(train.optimizer, "train.optimizer")
    offered = {name: getattr(train, name) for name in ("lr", "momentum", "betas", "weight_decay")}
    try:
        made = called(train.optimizer, "train.optimizer", only_taken(make, offered), parameters)
    except UserError:
        raise
    except Exception as error:  # of the user's code
        raise UserError(f"train.optimizer {train.optimizer} cannot be made: {where_and_what(error)}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(f"train.optimizer {train.optimizer} must give an Optimizer, and gave {type(made).__name__}")
    return made


def of_one_mesh_each(parameters: list[Any]) -> list[Any]:
    """Plain tensors, and DTensors of each mesh, in groups of their own: a fused step takes one kind at a time."""
    kinds: dict[object, list[Any]] = {}
    for parameter in parameters:
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return parameters if len(kinds) < 2 else [{"params": group} for group in kinds.values()]


def should_fuse(parameters: list[Any]) -> bool:
    """On a GPU one kernel does all of a step."""
    return all(tensor.is_cuda for tensor in tensors_of(parameters))


def tensors_of(parameters: list[Any]) -> list[Tensor]:
    """Of a list of tensors, or of groups of them."""
    return [tensor for p in parameters for tensor in (p["params"] if isinstance(p, dict) else [p])]


def optimizer_factory(train: Train) -> partial[torch.optim.Optimizer]:
    """What a strategy calls once it knows which parameters are left to train on this rank."""
    return partial(build_optimizer, train)


def learning_rate(train: Train, step: int, total_steps: int) -> float:
    """The rate of step 0, 1, ...: linear warm-up, then constant, cosine down to `lr_decay`, or steps."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if is_import(train.schedule):
        factor = imported(train.schedule, "train.schedule")(step, total_steps)
        if not isinstance(factor, int | float) or not 0 <= factor < inf:
            raise UserError(f"train.schedule {train.schedule} must give a factor of the rate, and gave {factor!r}")
        return train.lr * float(factor)
    progress = (step - train.warmup_steps) / max(1, total_steps - train.warmup_steps)
    if train.schedule == "cosine":
        return train.lr * (train.lr_decay + (1 - train.lr_decay) * 0.5 * (1 + cos(pi * min(1.0, progress))))
    if train.schedule == "step":
        passed = sum(step / max(1, total_steps) >= milestone for milestone in train.lr_milestones)
        return train.lr * float(train.lr_decay**passed)
    return train.lr
