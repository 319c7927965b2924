"""Networks as plain single-device code: no model mentions ranks."""

import copy
from contextlib import nullcontext

import torch
from torch import nn

from lockstep.config import models as sections
from lockstep.config.gpt import gpt_shape
from lockstep.data.dataset import DataSpec
from lockstep.errors import UserError
from lockstep.models.cnn import CNN
from lockstep.models.flops import forward_flops, training_flops
from lockstep.models.gpt import GPT
from lockstep.models.hf import build_hf, vocabulary_of
from lockstep.models.initial import Deferred, Unfilled, seeded
from lockstep.models.mlp import MLP
from lockstep.models.resnet import ResNet
from lockstep.models.user_model import check_outputs, user_model


def build_model(config: sections.Model, spec: DataSpec, seed: int | None = None) -> nn.Module:
    """The network that `config` names, for data that looks like `spec`; the same weights for the same seed."""
    if seed is None:
        with Unfilled() if torch.empty(0).is_meta else nullcontext():
            return _build(config, spec)
    if not is_users(config):
        return Deferred(lambda: _build(config, spec), seed).whole()
    with seeded(seed):
        return _build(config, spec)


_ON_META: dict[tuple[str, str], nn.Module] = {}


def on_meta(config: sections.Model, spec: DataSpec) -> nn.Module:
    """Its shapes, without memory: a copy of what is built once."""
    key = (repr(config), repr(spec))
    if key not in _ON_META:
        with torch.device("meta"):
            _ON_META[key] = build_model(config, spec)
    return copy.deepcopy(_ON_META[key])


def _build(config: sections.Model, spec: DataSpec) -> nn.Module:
    match config:
        case sections.MLP():
            features = 1
            for size in spec.shape:
                features *= size
            return MLP(features, config.width, spec.classes, config.layers)
        case sections.CNN():
            return CNN(spec.shape, config.channels, config.hidden, spec.classes)
        case sections.ResNet():
            return ResNet(spec.shape, config.depth, config.width, spec.classes, config.norm, config.stages)
        case sections.GPT():
            return GPT(gpt_shape(config, spec.classes))
        case sections.HF():
            if vocabulary_of(config.path) < spec.classes:
                raise UserError(
                    f"{config.path} has a vocabulary of {vocabulary_of(config.path):,}, and the data {spec.classes:,} "
                    f"different tokens; use data made with the model's own tokenizer"
                )
            return build_hf(config)
        case sections.Own():
            return user_model(config)


def is_users(config: sections.Model) -> bool:
    """A model whose constructor is not ours: its weights may depend on each other (`initial.py`), so every rank builds
    it whole, and takes the first rank's weights.
    """
    return isinstance(config, sections.HF | sections.Own)


def parameter_count(model: nn.Module) -> int:
    """Every parameter once, tied ones too."""
    return sum(p.numel() for p in model.parameters())


__all__ = [
    "build_model",
    "check_outputs",
    "forward_flops",
    "gpt_shape",
    "is_users",
    "parameter_count",
    "training_flops",
    "user_model",
]
