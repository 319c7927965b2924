"""Networks as plain single-device code: no model mentions ranks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config import schema
from lockstep.config.own import called, where_and_what
from lockstep.data.dataset import DataSpec
from lockstep.errors import UserError
from lockstep.models.cnn import CNN
from lockstep.models.deferred import seeded
from lockstep.models.gpt import GPT, SIZES, Shape
from lockstep.models.hf import build_hf, vocabulary_of
from lockstep.models.mlp import MLP
from lockstep.models.resnet import ResNet


def build_model(config: schema.Model, spec: DataSpec, seed: int | None = None) -> nn.Module:
    """The network that `config` names, for data that looks like `spec`; the same weights for the same seed."""
    if seed is None:
        return _build(config, spec)
    with seeded(seed):
        return _build(config, spec)


def _build(config: schema.Model, spec: DataSpec) -> nn.Module:
    match config:
        case schema.MLP():
            features = 1
            for size in spec.shape:
                features *= size
            return MLP(features, config.width, spec.classes, config.layers)
        case schema.CNN():
            return CNN(spec.shape, config.channels, config.hidden, spec.classes)
        case schema.ResNet():
            return ResNet(spec.shape, config.depth, config.width, spec.classes, config.norm)
        case schema.GPT():
            return GPT(gpt_shape(config, spec))
        case schema.HF():
            if vocabulary_of(config.path) < spec.classes:
                raise UserError(
                    f"{config.path} has a vocabulary of {vocabulary_of(config.path):,}, and the data {spec.classes:,} "
                    f"different tokens; use data made with the model's own tokenizer"
                )
            return build_hf(config)
        case schema.Own():
            return own_model(config)


def is_others(config: schema.Model) -> bool:
    """A model whose constructor is not ours: it may do what cannot be noted and played back (`deferred.py`), so every
    rank builds it whole, and takes the first rank's weights.
    """
    return isinstance(config, schema.HF | schema.Own)


def own_model(config: schema.Own) -> nn.Module:
    assert config.import_ is not None, "checked with the config"
    found = called(config.import_, "model.import", config.args)
    if not isinstance(found, nn.Module):
        raise UserError(f"model.import {config.import_} must give an nn.Module, and gave a {type(found).__name__}")
    return found


def gpt_shape(config: schema.GPT, spec: DataSpec) -> Shape:
    d_model, layers, heads = (
        (config.d_model, config.layers, config.heads) if config.size == "custom" else SIZES[config.size]
    )
    kv_heads = config.kv_heads or heads
    if d_model % heads:
        raise UserError(f"model.d_model {d_model} must be a multiple of model.heads {heads}")
    if heads % kv_heads:
        raise UserError(f"model.heads {heads} must be a multiple of model.kv_heads {kv_heads}")
    if config.position == "rope" and d_model // heads % 2:
        raise UserError(f"model.position rope needs heads of an even size, but d_model/heads is {d_model // heads}")
    vocabulary = config.vocabulary or spec.classes
    if vocabulary < spec.classes:
        raise UserError(f"model.vocabulary is {vocabulary}, but the data set has {spec.classes} different tokens")
    return Shape(
        d_model=d_model,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        context=config.context,
        vocabulary=vocabulary,
        norm=config.norm,
        position=config.position,
        activation=config.activation,
        tied=config.tied,
        dropout=config.dropout,
        attention=config.attention,
        residual=config.residual,
        own_gelu=config.own_gelu,
    )


def parameter_count(model: nn.Module) -> int:
    """Every parameter once, tied ones too."""
    return sum(p.numel() for p in model.parameters())


def forward_flops(model: nn.Module, spec: DataSpec) -> int:
    """Multiplications and additions (2 per multiply-add) of one sample's forward pass, matrix products only: what the
    model says, or what is counted on the meta device, where it must be then. 0 where that cannot run.
    """
    says: Any = getattr(model, "forward_flops", None)
    if says is not None:
        return int(says())
    counter = FlopCounterMode(display=False)
    with counter:
        tried = outputs_on_meta(model, spec)
    return int(counter.get_total_flops()) if tried is not None else 0


def outputs_on_meta(model: nn.Module, spec: DataSpec) -> Any:
    """Of one sample, without computing anything; None where an imported model does what that device does not know."""
    sample = torch.zeros((1, *spec.shape), dtype=torch.int64 if spec.kind == "tokens" else None, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            outputs = model(sample)
    except Exception as error:
        if isinstance(error, NotImplementedError) or "meta" in str(error):
            return None
        shape = "x".join(map(str, spec.shape))
        raise UserError(
            f"{type(model).__name__} cannot take samples of {shape} ({spec.kind}): {where_and_what(error)}"
        ) from error
    return outputs


def check_outputs(config: schema.Own, spec: DataSpec, own_loss: str | None) -> None:
    """Refuse an imported model whose outputs do not fit the data's targets, where no loss of the user's own does."""
    with torch.device("meta"):
        outputs = outputs_on_meta(own_model(config), spec)
    if outputs is not None and not isinstance(outputs, Tensor):
        raise UserError(
            f"model.import {config.import_} gives a {type(outputs).__name__}, and must give one tensor, its outputs"
        )
    if outputs is None or own_loss is not None:
        return
    if spec.kind == "regression":
        if outputs[0].numel() != spec.classes:
            raise UserError(
                f"model.import {config.import_} gives {outputs[0].numel()} numbers for a sample, and the data has "
                f"{spec.classes}; make them alike, or give --train.loss"
            )
    elif outputs.dim() < 2 or outputs.shape[-1] < spec.classes:
        raise UserError(
            f"model.import {config.import_} gives outputs of shape {tuple(outputs.shape)} for one sample, and the data "
            f"has {spec.classes} classes; the last size must be at least that, or give --train.loss"
        )


def training_flops(model: nn.Module, spec: DataSpec) -> int:
    """Of one sample's forward and backward pass: backward costs two products for each of forward's."""
    return 3 * forward_flops(model, spec)


__all__ = [
    "build_model",
    "check_outputs",
    "forward_flops",
    "gpt_shape",
    "is_others",
    "own_model",
    "parameter_count",
    "training_flops",
]
