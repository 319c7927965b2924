"""Data sets: everything in memory, cut into global batches by a sampler and into shares by rank."""

from pathlib import Path

import torch

from lockstep.config import GPT, HF, Config
from lockstep.data.batch import IGNORED, Batch, Inputs, Share, called_with, first_rows, mapped, shard_batch, tensors_in
from lockstep.data.cifar10 import load_cifar10
from lockstep.data.dataset import DataSet, DataSpec, Kind, Samples, Split, Windows
from lockstep.data.digits import load_digits
from lockstep.data.images import ImageFolder, augmented, load_imagefolder
from lockstep.data.mnist import load_mnist
from lockstep.data.reading import Reader
from lockstep.data.sampler import Sampler, read_share
from lockstep.data.synthetic import make_synthetic
from lockstep.data.text import load_text
from lockstep.data.tokens import MappedTokens, load_tokens
from lockstep.data.user_data import Mapped, Streamed, collated, digest, first_of, load_local
from lockstep.errors import UserError

READS: dict[str, tuple[Kind, ...]] = {
    "mlp": ("regression", "images"),
    "cnn": ("images",),
    "resnet": ("images",),
    "gpt": ("tokens",),
    "hf": ("tokens",),
    "own": ("images", "tokens", "regression", "other"),
}
"""Which kinds of data each model reads; the first is its synthetic default."""

SETS_BY_KIND = {
    "images": "digits, mnist, cifar10, imagefolder, synthetic",
    "tokens": "text, tokens, synthetic",
    "regression": "synthetic",
    "other": "own",
}


def build_data(config: Config, device: torch.device | str = "cpu") -> DataSet:
    """The data set that the config names, in the form that its model reads."""
    data, path = config.data, Path(config.data.path or "datasets")
    context = config.model.context if isinstance(config.model, GPT | HF) else 128
    if data.name == "synthetic":
        dataset = _synthetic(config, context, device)
    elif data.name == "tokens":
        if data.path is None:
            raise UserError("data.name tokens needs data.path, a folder that lockstep tokenize has made")
        dataset = load_tokens(path, context)
    elif data.name == "imagefolder":
        dataset = load_imagefolder(path, data.shape)
    elif data.name == "own":
        dataset = load_local(data, config.train.seed)
    elif data.name == "digits":
        dataset = load_digits()
    elif data.name == "mnist":
        dataset = load_mnist(path, data.download)
    elif data.name == "cifar10":
        dataset = load_cifar10(path, data.download)
    else:
        dataset = load_text(None if data.path is None else path, context, data.max_bytes)
    kinds = READS[config.model.name]
    if isinstance(config.model, GPT) and data.name == "own" and dataset.spec.shape != (config.model.context,):
        raise UserError(
            f"model.context is {config.model.context}, and samples of data.import {data.import_} are of shape "
            f"{dataset.spec.shape}; make them alike"
        )
    if dataset.spec.kind not in kinds:
        fitting = "; ".join(f"data.name {SETS_BY_KIND[kind]} ({kind})" for kind in kinds)
        raise UserError(
            f"model.name {config.model.name} does not read {dataset.spec.kind} (data.name {data.name}); use {fitting}"
        )
    return augmented(dataset, data.augment, config.train.seed)


def _synthetic(config: Config, context: int, device: torch.device | str) -> DataSet:
    data, model = config.data, config.model
    kind = data.kind or READS[model.name][0]
    shape: tuple[int, ...]
    if kind == "tokens":
        shape, classes = (context,), (model.vocabulary if isinstance(model, GPT) else None) or 256
    else:
        shape, classes = data.shape, data.classes
        if kind == "regression":
            shape = (data.shape[-1],)
        elif len(shape) != 3:
            raise UserError(f"data.shape is {shape}, but an image needs 3 sizes: channels height width")
    return make_synthetic(kind, shape, classes, data.samples, config.train.seed, device)


__all__ = [
    "IGNORED",
    "READS",
    "Batch",
    "DataSet",
    "DataSpec",
    "ImageFolder",
    "Inputs",
    "Kind",
    "Mapped",
    "MappedTokens",
    "Reader",
    "Sampler",
    "Samples",
    "Share",
    "Split",
    "Streamed",
    "Windows",
    "build_data",
    "called_with",
    "collated",
    "digest",
    "first_of",
    "first_rows",
    "make_synthetic",
    "mapped",
    "read_share",
    "shard_batch",
    "tensors_in",
]
