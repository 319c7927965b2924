"""A checkpoint as a plain model on one device, and as one safetensors file for other tools."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.checkpoint import manifest
from lockstep.checkpoint.checkpoints import CHECKPOINTS, Checkpoints
from lockstep.checkpoint.storage import read_into, saved_names
from lockstep.config import Config, load_config
from lockstep.data import DataSet, build_data
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.models.lora import merge_lora
from lockstep.training.prepare import load_weights, prepared_model


def find_checkpoint(source: Path) -> Path:
    """A run's newest whole checkpoint, or the one that was named, if it is whole."""
    if (source / manifest.MANIFEST).exists():
        found, damage = Checkpoints(World(), source.parent).newest_whole([source])
    else:
        found, damage = Checkpoints(World(), source / CHECKPOINTS).newest_whole()
    if found is None:
        reason = f": {damage[0]}" if damage else "; give a run's folder, or one of its checkpoints"
        raise UserError(f"{source} has no whole checkpoint{reason}")
    return found


def config_of(source: Path) -> Config:
    """Of the run that a folder, a checkpoint or an exported file belongs to."""
    run = source.parent if source.suffix == ".safetensors" else find_checkpoint(source).parent.parent
    return load_config(run / "config.yaml")


def load_model(source: Path) -> tuple[nn.Module, Config, DataSet]:
    """The trained model of a run, a checkpoint or an exported file, adapters merged; with its config and data."""
    file = source if source.suffix == ".safetensors" else None
    checkpoint = None if file is not None else find_checkpoint(source)
    config = config_of(source)
    config.train.recompute = "none"
    dataset = build_data(config)
    if file is not None:
        config.lora.rank = 0  # merged when it was exported
        model = prepared_model(config, dataset.spec)
        load_weights(model, file)
    else:
        assert checkpoint is not None
        model = prepared_model(config, dataset.spec)
        fill(model, checkpoint, adapters_only=config.lora.rank > 0)
    return merge_lora(model), config, dataset


@torch.no_grad()
def fill(model: nn.Module, checkpoint: Path, adapters_only: bool) -> None:
    """Read the weights of a checkpoint into a plain model, whoever has saved it."""
    saved = saved_names(checkpoint)
    wanted: dict[str, Tensor] = {f"model.{n}": p.data for n, p in model.named_parameters()}
    wanted |= {f"model.{n}": b for n, b in model.named_buffers() if f"model.{n}" in saved}
    missing = [n for n in wanted if n not in saved and not adapters_only]
    if missing:
        raise UserError(f"{checkpoint} has no {missing[0]}: it is of another model than its run's config.yaml")
    state = {name: tensor for name, tensor in wanted.items() if name in saved}
    read_into(state, checkpoint)


def export_weights(source: Path, target: Path) -> int:
    """Write a run's weights to one safetensors file; returns the number of tensors."""
    model, _, _ = load_model(source)
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}  # tied ones once
    tensors |= {name: b.detach().contiguous() for name, b in model.named_buffers()}
    save_file(tensors, target, metadata={"format": "pt"})
    return len(tensors)
