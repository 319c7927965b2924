"""A model of the user's own, by its import path: built, and looked at before ranks start."""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.models import Own
from lockstep.config.user_code import called, where_and_what
from lockstep.data.dataset import DataSpec
from lockstep.errors import UserError
from lockstep.models.flops import try_out
from lockstep.models.loss import logits_of


def user_model(config: Own) -> nn.Module:
    assert config.import_ is not None, "checked with the config"
    found = called(config.import_, "model.import", config.args)
    if not isinstance(found, nn.Module):
        raise UserError(f"model.import {config.import_} must give an nn.Module, and gave a {type(found).__name__}")
    return found


def outputs_of(config: Own, spec: DataSpec) -> Any:
    """For a few samples: without computing anything where the meta device can do all that the model does."""
    try:
        with torch.device("meta"):
            return try_out(user_model(config), spec, "meta")
    except UserError:
        raise
    except Exception:  # of a user's code: a mistake in it, or something that the meta device has not (`tensor.item()`)
        model = user_model(config)
    try:
        return try_out(model, spec, "cpu")
    except Exception as error:
        shape = "x".join(map(str, spec.shape))
        raise UserError(
            f"{type(model).__name__} cannot take samples of {shape} ({spec.kind}): {where_and_what(error)}"
        ) from error


def check_outputs(config: Own, spec: DataSpec, user_loss: str | None) -> None:
    """Refuse an imported model whose outputs do not fit the data's targets, where no loss of the user's own does."""
    given = outputs_of(config, spec)
    if user_loss is not None:
        return
    outputs = logits_of(given)
    if not isinstance(outputs, Tensor):
        raise UserError(
            f"model.import {config.import_} gives a {type(given).__name__}, and must give a tensor, its outputs, or "
            f"something with them as .logits; or give --train.loss, which is called with what the model gives"
        )
    if spec.kind == "regression":
        if outputs[0].numel() != spec.classes:
            raise UserError(
                f"model.import {config.import_} gives {outputs[0].numel()} numbers for a sample, and the data has "
                f"{spec.classes}; make them alike, or give --train.loss"
            )
        return
    classes = spec.classes if spec.seen is None else spec.seen
    last, second = outputs.shape[-1] >= classes, outputs.dim() > 2 and outputs.shape[1] >= classes
    if outputs.dim() > 3 and len(set(outputs.shape[1:])) == 1:
        raise UserError(
            f"model.import {config.import_} gives outputs of shape {tuple(outputs.shape[1:])} for one sample, in which "
            f"classes may be the first size or the last; give --train.loss, which knows"
        )
    if outputs.dim() < 2 or not (last or second):
        raise UserError(
            f"model.import {config.import_} gives outputs of shape {tuple(outputs.shape[1:])} for one sample, and "
            f"the data has {classes} classes; the last size (or the first) must be that, or give --train.loss"
        )
