"""Our GPT in its two forms as Hugging Face's GPT-2 and Llama, and back: the same numbers under other names.

GPT-2    linear layers are stored as (inputs, outputs), the opposite of nn.Linear's
Llama    queries, keys and values, and the two halves of the gated MLP, are layers of their own
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config import schema
from lockstep.errors import UserError
from lockstep.models.gpt import GPT, Shape

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One tensor of ours, and the ones of theirs that it is made of, one under the other."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False


LARGEST = {"layers": 10_000}
"""Of what config.json says; of anything else, 1,000,000,000."""


def form_of(shape: Shape) -> str:
    """gpt2 or llama; other mixtures have no name there."""
    parts = (shape.norm, shape.position, shape.activation)
    if parts == ("layernorm", "learned", "gelu") and shape.tied and shape.kv_heads == shape.heads:
        return "gpt2"
    if parts == ("rmsnorm", "rope", "swiglu"):
        return "llama"
    raise UserError(
        "Hugging Face has GPT-2 (layernorm, learned, gelu, tied, kv_heads as heads) and Llama (rmsnorm, rope, swiglu); "
        f"this model has {', '.join(parts)}, {'tied' if shape.tied else 'untied'}, {shape.kv_heads} of {shape.heads} "
        f"heads of keys"
    )


def rows(form: str, layers: int, tied: bool) -> list[Row]:
    """Which tensor is which."""
    if form == "gpt2":
        found = [Row("token_embedding.weight", ("transformer.wte.weight",))]
        found.append(Row("position_embedding.weight", ("transformer.wpe.weight",)))
        for i in range(layers):
            ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
            for part in ("weight", "bias"):
                found += [
                    Row(f"{ours}.attention_norm.{part}", (f"{theirs}.ln_1.{part}",)),
                    Row(f"{ours}.mlp_norm.{part}", (f"{theirs}.ln_2.{part}",)),
                ]
                pairs = {"attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj"}
                pairs |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
                found += [
                    Row(f"{ours}.{a}.{part}", (f"{theirs}.{b}.{part}",), transposed=part == "weight")
                    for a, b in pairs.items()
                ]
        return [*found, *(Row(f"norm.{p}", (f"transformer.ln_f.{p}",)) for p in ("weight", "bias"))]
    found = [Row("token_embedding.weight", ("model.embed_tokens.weight",))]
    for i in range(layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        found += [
            Row(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",)),
            Row(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",)),
            Row(f"{ours}.attention.qkv.weight", tuple(f"{attention}.{part}_proj.weight" for part in "qkv")),
            Row(f"{ours}.attention.output.weight", (f"{attention}.o_proj.weight",)),
            Row(f"{ours}.mlp.up.weight", (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")),
            Row(f"{ours}.mlp.down.weight", (f"{mlp}.down_proj.weight",)),
        ]
    found.append(Row("norm.weight", ("model.norm.weight",)))
    return found if tied else [*found, Row("head.weight", ("lm_head.weight",))]


def to_hf(model: GPT) -> tuple[dict[str, Any], Tensors]:
    """(what goes into config.json, tensors by their names)."""
    shape = model.shape
    form, ours = form_of(shape), dict(model.named_parameters())
    tensors: Tensors = {}
    for row in rows(form, shape.layers, shape.tied):
        tensor = ours[row.ours].detach()
        widths = part_widths(row, shape)
        for name, part in zip(row.theirs, tensor.split(widths) if widths else (tensor,), strict=True):
            tensors[name] = (part.t() if row.transposed else part).contiguous().clone()
    return hf_config(shape, form), tensors


def part_widths(row: Row, shape: Shape) -> list[int] | None:
    if len(row.theirs) == 3:
        kv_width = shape.kv_heads * shape.head_size
        return [shape.d_model, kv_width, kv_width]
    return [shape.mlp_width] * 2 if len(row.theirs) == 2 else None


def hf_config(shape: Shape, form: str) -> dict[str, Any]:
    if form == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": shape.d_model,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_positions": shape.context,
            "vocab_size": shape.vocabulary,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), shape.dropout),
            **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.d_model,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
    }


def config_from_hf(theirs: dict[str, Any]) -> schema.GPT:
    """What our config says for the same network; refused where ours has no such thing."""
    kind = theirs.get("model_type")
    needs: dict[str, tuple[Any, ...]]
    try:
        if kind == "gpt2":
            needs = {
                "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
                "layer_norm_epsilon": (1e-5,),
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "tie_word_embeddings": (True,),
            }
            found = schema.GPT(
                d_model=theirs["n_embd"],
                layers=theirs["n_layer"],
                heads=theirs["n_head"],
                context=theirs.get("n_positions", 1024),
                vocabulary=theirs["vocab_size"],
            )
            if theirs.get("n_inner") not in (None, 4 * found.d_model):
                raise UserError(f"n_inner is {theirs['n_inner']}, and ours is 4 x n_embd")
        elif kind == "llama":
            needs = {"hidden_act": ("silu",), "rms_norm_eps": (1e-5,)}
            found = schema.GPT(
                d_model=theirs["hidden_size"],
                layers=theirs["num_hidden_layers"],
                heads=theirs["num_attention_heads"],
                kv_heads=theirs.get("num_key_value_heads") or theirs["num_attention_heads"],
                context=theirs.get("max_position_embeddings", 2048),
                vocabulary=theirs["vocab_size"],
                norm="rmsnorm",
                position="rope",
                activation="swiglu",
                tied=bool(theirs.get("tie_word_embeddings", False)),
            )
            check_llama(theirs, found)
        else:
            raise UserError(f"model_type is {kind!r}, and gpt2 and llama can be imported; train it as --model.name hf")
    except KeyError as missing:
        raise UserError(f"config.json has no {missing.args[0]}") from None
    for key in ("d_model", "layers", "heads", "kv_heads", "context", "vocabulary"):
        value, most = getattr(found, key), LARGEST.get(key, 10**9)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most):
            raise UserError(f"config.json gives {value!r} for what we call {key}, and it must be from 1 to {most:,}")
    for key, allowed in needs.items():
        if theirs.get(key, allowed[0]) not in allowed:
            raise UserError(f"{key} is {theirs[key]}, and ours is {allowed[0]}; train it as --model.name hf instead")
    return found


def check_llama(theirs: dict[str, Any], found: schema.GPT) -> None:
    width = -(-8 * found.d_model // (3 * 64)) * 64
    rope = theirs.get("rope_parameters") or {}
    theta = theirs.get("rope_theta") or rope.get("rope_theta") or 10_000.0
    scaled = theirs.get("rope_scaling") or (rope.get("rope_type", "default") != "default" and rope)
    others = {
        "intermediate_size": (theirs["intermediate_size"], width),
        "rope_theta": (float(theta), 10_000.0),
        "rope_scaling": (scaled or None, None),
        "head_dim": (theirs.get("head_dim") or found.d_model // found.heads, found.d_model // found.heads),
        "attention_bias": (bool(theirs.get("attention_bias")), False),
        "mlp_bias": (bool(theirs.get("mlp_bias")), False),
    }
    for key, (is_, ours) in others.items():
        if is_ != ours:
            raise UserError(f"{key} is {is_}, and ours is {ours}; train it as --model.name hf instead")


def tensors_from_hf(config: schema.GPT, theirs: Tensors) -> Tensors:
    """By our names."""
    form = "gpt2" if config.norm == "layernorm" else "llama"
    if form == "gpt2" and "wte.weight" in theirs:  # the published GPT-2 has no prefix
        theirs = {f"transformer.{name}": tensor for name, tensor in theirs.items()}
    found: Tensors = {}
    for row in rows(form, config.layers, config.tied):
        missing = [name for name in row.theirs if name not in theirs]
        if missing:
            raise UserError(f"the weights have no {missing[0]}")
        parts = [theirs[name].t() if row.transposed else theirs[name] for name in row.theirs]
        found[row.ours] = torch.cat(parts).contiguous() if len(parts) > 1 else parts[0].contiguous()
    known = {name for row in rows(form, config.layers, config.tied) for name in row.theirs}
    surplus = [name for name in theirs if name not in known and not name.endswith(UNUSED)]
    if surplus and not (config.tied and surplus == ["lm_head.weight"]):
        raise UserError(f"the weights have {surplus[0]}, which the network of config.json has not")
    return found


UNUSED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Masks and tables that some folders hold, and no network needs."""
