"""A causal language model of Hugging Face's, from a folder that has its config.json and perhaps its weights.

It is theirs, names and all; only its forward is ours: tokens in, logits out, as every model here.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.models import HF
from lockstep.errors import UserError
from lockstep.models.gpt import fused
from lockstep.strange import json_of

INSTALL = 'pip install -e ".[hf]"'
DROPOUTS = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout", "classifier_dropout")
KINDS = {"colwise": "column", "rowwise": "row"}
"""Their words for how tensor parallelism cuts a layer, and ours."""


def vocabulary_of(folder: str | None) -> int:
    """By its config.json alone, without transformers."""
    file = Path(folder or "") / "config.json"
    if folder is None:
        raise UserError("model.name hf needs model.path, a folder with a config.json")
    try:
        return int(json_of(file)["vocab_size"])
    except OSError as error:
        raise UserError(f"model.path {folder} has no config.json that can be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a language model's config: {error}") from None


def build_hf(config: HF) -> nn.Module:
    """With the folder's weights if it has some, else with random ones by the seed that is set."""
    vocabulary_of(config.path)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UserError(f"model.name hf needs the transformers package: {INSTALL}") from None
    folder = Path(str(config.path))
    model: Any
    try:
        theirs = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        theirs.use_cache = False  # of keys and values, for writing
        for name in DROPOUTS if config.dropout is not None else ():
            if hasattr(theirs, name):
                setattr(theirs, name, config.dropout)
        options: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": torch.float32, "trust_remote_code": False}
        on_meta = torch.empty(0).device.type == "meta"
        if list(folder.glob("*.safetensors")) and not on_meta:
            options |= {"config": theirs, "local_files_only": True, "use_safetensors": True}
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
            model, loading = loaded
            check_loaded(loading, folder)
        else:
            model = AutoModelForCausalLM.from_config(theirs, **options)
    except UserError:
        raise
    except Exception as error:  # a config or weights that transformers trips over, in whichever way
        raise UserError(f"model.path {folder} cannot be built: {' '.join(str(error).split())[:300]}") from None
    return with_logits(model.train())


def check_loaded(loading: dict[str, Any], folder: Path) -> None:
    """Layers that its weights have not would begin at random, and those of other shapes too."""
    for what, said in (("missing_keys", "its weights have no"), ("mismatched_keys", "its weights do not fit")):
        if wrong := sorted(map(str, loading.get(what) or ())):
            raise UserError(f"model.path {folder}: {said} {wrong[0]} (and {len(wrong) - 1} more); mend its config.json")


def with_logits(model: Any) -> nn.Module:
    """The same object, of a class whose forward takes tokens and gives logits, and which says how it is cut."""
    theirs = type(model)

    def forward(self: Any, tokens: Tensor) -> Tensor:
        logits: Tensor = theirs.forward(self, input_ids=tokens, use_cache=False).logits
        return logits

    ours: dict[str, Any] = {"forward": forward}
    if plan := tensor_plan(model):
        ours["tensor_plan"] = lambda self: plan
        ours["tensor_sizes"] = lambda self: tensor_sizes(model.config)
        mark_heads(model, plan)
    model.__class__ = type(theirs.__name__, (theirs,), ours)
    made: nn.Module = model
    return made


def tensor_plan(model: Any) -> dict[str, str]:
    """Theirs in our words; nothing where they have none, or one that we have no word for."""
    theirs = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = f"{model.base_model_prefix}."
    plan = {prefix + name: KINDS[kind] for name, kind in theirs.items() if kind in KINDS}
    return plan if len(plan) == len(theirs) else {}


def mark_heads(model: nn.Module, plan: dict[str, str]) -> None:
    """Layers of queries, keys and values are cut between heads."""
    shape: Any = model.config
    kv_heads = getattr(shape, "num_key_value_heads", shape.num_attention_heads)
    for name, part in model.named_modules():
        heads = {"q_proj": shape.num_attention_heads, "k_proj": kv_heads, "v_proj": kv_heads}.get(name.split(".")[-1])
        if heads is not None and isinstance(part, nn.Linear):
            fused(part, (part.out_features,), (heads,))


def tensor_sizes(shape: Any) -> dict[str, int]:
    """What a degree must divide, by the names that a config.json has for it."""
    found = {
        name: int(getattr(shape, name))
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        if getattr(shape, name, None)
    }
    return found
