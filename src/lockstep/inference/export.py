"""A checkpoint as a plain model on one device, as one safetensors file for other tools, and as a folder that Hugging
Face's transformers load; and such a folder as a model of ours.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep.checkpoint import manifest
from lockstep.checkpoint.checkpoints import CHECKPOINTS, Checkpoints, check_same_course
from lockstep.checkpoint.storage import read_into, saved_names
from lockstep.config import Config, Data, load_config, save_config
from lockstep.config.trust import Consent, check_trusted
from lockstep.data import DataSpec, build_data
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.models import build_model
from lockstep.models.convert import config_from_hf, tensors_from_hf, to_hf
from lockstep.models.gpt import GPT
from lockstep.models.lora import merge_lora
from lockstep.parallel.optimizer.average import AVERAGE
from lockstep.parallel.optimizer.schedule_free import averaged
from lockstep.results.whole import made_whole
from lockstep.strange import json_of
from lockstep.training.prepare import frozen_weights, load_weights, prepared_model
from lockstep.training.run_folder import CONFIG, read_spec, write_spec


def find_checkpoint(source: Path, older: bool = False) -> Path:
    """A run's newest checkpoint, or the one that was named, if it is whole. `older`: else an older one."""
    if (source / manifest.MANIFEST).exists():
        found, damage = Checkpoints(World(), source.parent).newest_whole([source])
    else:
        found, damage = Checkpoints(World(), source / CHECKPOINTS).newest_whole()
    if found is None:
        reason = f": {damage[0]}" if damage else "; give a run's folder, or one of its checkpoints"
        raise UserError(f"{source} has no whole checkpoint{reason}")
    if damage and not older:
        raise UserError(f"{damage[0]}; the newest whole one is {found}: name it, or take it by --older")
    return found


def weights_of(source: Path, older: bool = False) -> Path:
    """Where a model's weights are: an exported or imported file, or a checkpoint."""
    imported = source / "model.safetensors"
    if source.suffix == ".safetensors":
        return source
    if not (source / manifest.MANIFEST).exists() and not (source / CHECKPOINTS).is_dir() and imported.is_file():
        return imported
    return find_checkpoint(source, older)


def run_of(weights: Path) -> Path:
    """The folder that they belong to."""
    return weights.parent if weights.suffix == ".safetensors" else weights.parent.parent


def load_config_and_spec(source: Path, consent: Consent) -> tuple[Config, DataSpec, Path]:
    """The config of a run, what its samples look like, and where its weights are. No data is read where the run says it
    (`data.json`), and no code of the folder's is run without consent.
    """
    weights = weights_of(source, consent.older)
    run = run_of(weights)
    config = load_config(run / CONFIG)
    check_trusted(config, run / CONFIG, consent.named, consent.trust, only=("model.import",))
    spec = read_spec(run)
    if spec is None:
        check_trusted(config, run / CONFIG, consent.named, consent.trust, only=("data.import",))
        spec = build_data(config).spec
    return config, spec, weights


def load_model(source: Path, consent: Consent | None = None) -> tuple[nn.Module, Config, DataSpec]:
    """The trained model of a run, a checkpoint or an exported file, adapters merged; with its config and its data's
    shape.
    """
    config, spec, weights = load_config_and_spec(source, consent or Consent())
    config.train.recompute, config.train.precision = "none", "fp32"
    if weights.suffix == ".safetensors":
        config.lora.rank = 0  # merged when it was exported
        config.train.weights = None
        model = prepared_model(config, spec)
        load_weights(model, weights)
    else:
        model = prepared_model(config, spec)
        if wanted := frozen_weights(config):
            check_same_course(manifest.read_run(weights), wanted, weights)
        fill(model, weights, adapters_only=config.lora.rank > 0)
    return merge_lora(model), config, spec


@torch.no_grad()
def fill(model: nn.Module, checkpoint: Path, adapters_only: bool) -> None:
    """Read the weights of a checkpoint into a plain model, under whatever layout it was saved: those that are
    evaluated, where the optimizer averages weights.
    """
    saved = saved_names(checkpoint)
    names = {n: f"optimizer.{n}.{AVERAGE}" for n, _ in model.named_parameters()}
    names = {n: name if name in saved else f"model.{n}" for n, name in names.items()}
    wanted: dict[str, Tensor] = {names[n]: p.data for n, p in model.named_parameters()}
    wanted |= {f"model.{n}": b for n, b in model.named_buffers() if f"model.{n}" in saved}
    missing = [n for n in wanted if n not in saved and not adapters_only]
    if missing:
        raise UserError(f"{checkpoint} has no {missing[0]}: it is of another model than its run's config.yaml")
    state = {name: tensor for name, tensor in wanted.items() if name in saved}
    read_into(state, checkpoint)
    take_schedule_free_average({n: p for n, p in model.named_parameters() if f"optimizer.{n}.z" in saved}, checkpoint)


@torch.no_grad()
def take_schedule_free_average(trained: dict[str, nn.Parameter], checkpoint: Path) -> None:
    """Schedule-free AdamW keeps no average: it follows from the weights and from one more sequence of them."""
    state = {f"optimizer.{n}.z": torch.empty_like(p) for n, p in trained.items()}
    state |= {f"optimizer.{n}.beta1": torch.zeros((), dtype=torch.float64) for n in trained}
    if state:
        read_into(state, checkpoint)
    for name, parameter in trained.items():
        z, beta1 = (state[f"optimizer.{name}.{key}"] for key in ("z", "beta1"))
        parameter.copy_(averaged(parameter, z, float(beta1)))


def export_weights(source: Path, target: Path, consent: Consent | None = None) -> int:
    """Write a run's weights to one safetensors file; returns the number of tensors."""
    model, _, _ = load_model(source, consent)
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}  # tied ones once
    tensors |= {name: b.detach().contiguous() for name, b in model.named_buffers()}
    save_file(tensors, target, metadata={"format": "pt"})
    return len(tensors)


# ---- Hugging Face ------------------------------------------------------------------------------------------------


def export_hf(source: Path, folder: Path, consent: Consent | None = None) -> int:
    """Write a run's model as a folder for `AutoModelForCausalLM.from_pretrained`; returns the number of tensors."""
    model, config, _ = load_model(source, consent)
    theirs: Any = model
    if config.model.name == "hf":
        with made_whole(folder) as part:
            first = dict(model.named_parameters()).keys()
            tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first
            tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name not in tied}
            save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
            theirs.config.save_pretrained(part)
        return len(tensors)
    if not isinstance(model, GPT):
        raise UserError(f"--format hf is for language models (model.name gpt or hf), and this is {config.model.name}")
    about, tensors = to_hf(model)
    with made_whole(folder) as part:
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    return len(tensors)


def import_hf(source: Path, folder: Path) -> Config:
    """Make a folder with our config.yaml and model.safetensors from a GPT-2's or Llama's; returns the config."""
    try:
        about = json_of(source / "config.json")
        if not isinstance(about, dict):
            raise ValueError("it holds no settings")
    except OSError as error:
        raise UserError(f"{source} has no config.json that can be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{source / 'config.json'} is no JSON of a model: {error}") from None
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise UserError(f"{source} has no *.safetensors; other formats may hold programs, and are not read")
    try:
        model = config_from_hf(about)
        theirs = {name: tensor for file in files for name, tensor in load_file(file).items()}
        tensors = tensors_from_hf(model, theirs)
        ours = build_model(model, DataSpec("tokens", (model.context,), 2))
        shapes = {name: tuple(p.shape) for name, p in ours.named_parameters()}
    except (UserError, SafetensorError, OSError, TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"{source} cannot be imported: {' '.join(str(error).split())[:300]}") from None
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            has = tuple(tensors[name].shape) if name in tensors else "none"
            raise UserError(
                f"{source} cannot be imported: config.json speaks of {shape} for {name}, the weights of {has}"
            )
    config = Config(model, Data(name="text"))
    with made_whole(folder) as part:
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        save_config(config, part / CONFIG)
        write_spec(part, DataSpec("tokens", (model.context,), model.vocabulary or 256))
    return config
