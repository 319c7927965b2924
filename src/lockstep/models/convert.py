"""Our GPT in its forms as Hugging Face's GPT-2, Llama and mixtures of experts, and back: the same numbers, renamed.

GPT-2                         linear layers are stored as (inputs, outputs), the opposite of nn.Linear's
Llama                         queries, keys and values, and the two halves of the gated MLP, are layers of their own
Mixtral, OLMoE, Qwen3-MoE     as Llama, and each expert's matrices are of their own: which of the three it is follows
                              from what is normalized (see `MIXTURES`)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config import models as sections
from lockstep.errors import UserError
from lockstep.models.gpt import GPT, Shape

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One tensor of ours, and the ones of theirs that it is made of, one under the other."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False
    stacked: bool = False
    """Theirs are slices of it, one for each expert."""


MIXTURES = {
    ("none", True): "mixtral",
    ("all", False): "olmoe",
    ("all", True): "olmoe",
    ("head", True): "qwen3_moe",
    ("head", False): "qwen3_moe",
}
"""(qk_norm, normalize) -> the family that has it."""

SIZE_KEYS = ("d_model", "layers", "heads", "kv_heads", "context", "vocabulary", "mlp_width")
LARGEST = {"layers": 10_000}
"""Of what config.json says; of anything else, 1,000,000,000."""


def form_of(shape: Shape) -> str:
    """gpt2 or llama; other mixtures have no name there."""
    parts = (shape.norm, shape.position, shape.activation)
    if parts == ("layernorm", "learned", "gelu") and shape.tied and shape.kv_heads == shape.heads:
        return "gpt2"
    if parts == ("rmsnorm", "rope", "swiglu") and shape.experts:
        return mixture_of(shape)
    if parts == ("rmsnorm", "rope", "swiglu") and shape.qk_norm == "none":
        return "llama"
    raise UserError(
        "Hugging Face has GPT-2 (layernorm, learned, gelu, tied, kv_heads as heads) and Llama (rmsnorm, rope, swiglu); "
        f"this model has {', '.join(parts)}, {'tied' if shape.tied else 'untied'}, {shape.kv_heads} of {shape.heads} "
        f"heads of keys"
    )


def mixture_of(shape: Shape) -> str:
    """Refused where no family has it."""
    found = MIXTURES.get((shape.qk_norm, shape.normalize))
    odd = {
        "model.scoring sigmoid": shape.scoring != "softmax",
        "model.shared_experts": shape.shared_experts > 0,
        "model.dense_layers": shape.dense_layers > 0,
        "model.balance bias": shape.balance == "bias",
        "model.capacity": shape.capacity is not None,
        "model.normalize false without a norm of queries and keys": found is None,
    }
    for what, is_so in odd.items():
        if is_so:
            raise UserError(
                f"Hugging Face's Mixtral, OLMoE and Qwen3-MoE have no {what}; export the weights as they are "
                f"(lockstep export RUN)"
            )
    assert found is not None
    return found


def expert_rows(form: str, ours: str, theirs: str, experts: int) -> list[Row]:
    """The router's, and each expert's three."""
    mixtral = form == "mixtral"
    home = f"{theirs}.block_sparse_moe" if mixtral else f"{theirs}.mlp"
    names = {"gate": "w1", "up": "w3", "down": "w2"} if mixtral else {n: f"{n}_proj" for n in ("gate", "up", "down")}
    found = [Row(f"{ours}.mlp.router.weight", (f"{home}.gate.weight",))]
    for name, their_name in names.items():
        each = tuple(f"{home}.experts.{e}.{their_name}.weight" for e in range(experts))
        found.append(Row(f"{ours}.mlp.experts.{name}", each, stacked=True))
    return found


def rows(form: str, layers: int, tied: bool, experts: int = 0) -> list[Row]:
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
        ]
        if form in ("olmoe", "qwen3_moe"):
            found += [Row(f"{ours}.attention.{n}.weight", (f"{attention}.{n}.weight",)) for n in ("q_norm", "k_norm")]
        if experts:
            found += expert_rows(form, ours, theirs, experts)
            continue
        found += [
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
    for row in rows(form, shape.layers, shape.tied, shape.experts):
        tensor = ours[row.ours].detach()
        widths = part_widths(row, shape)
        parts = tensor.unbind() if row.stacked else tensor.split(widths) if widths else (tensor,)
        for name, part in zip(row.theirs, parts, strict=True):
            tensors[name] = (part.t() if row.transposed else part).contiguous().clone()
    return hf_config(shape, form), tensors


def part_widths(row: Row, shape: Shape) -> list[int] | None:
    if len(row.theirs) == 3:
        kv_width = shape.kv_heads * shape.head_size
        return [shape.q_width, kv_width, kv_width]
    return [shape.mlp_width] * 2 if len(row.theirs) == 2 else None


def hf_config(shape: Shape, form: str) -> dict[str, Any]:
    if form == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": shape.d_model,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_inner": shape.given_width or None,
            "n_positions": shape.context,
            "vocab_size": shape.vocabulary,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": shape.norm_eps,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), shape.dropout),
            **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
        }
    return {
        "architectures": [ARCHITECTURES[form]],
        "model_type": form,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.expert_width or shape.mlp_width,
        **mixture_config(shape, form),
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_base,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
    }


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
EXPERTS_KEY = {"mixtral": "num_local_experts", "olmoe": "num_experts", "qwen3_moe": "num_experts"}


def mixture_config(shape: Shape, form: str) -> dict[str, Any]:
    if not shape.experts:
        return {}
    own = {"qwen3_moe": {"moe_intermediate_size": shape.expert_width, "decoder_sparse_step": 1}}
    return {
        EXPERTS_KEY[form]: shape.experts,
        "num_experts_per_tok": shape.active,
        "norm_topk_prob": shape.normalize,
        "router_aux_loss_coef": shape.balance_coefficient if shape.balance == "loss" else 0.0,
        **own.get(form, {}),
    }


def config_from_hf(theirs: dict[str, Any]) -> sections.GPT:
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
            found = sections.GPT(
                d_model=theirs["n_embd"],
                layers=theirs["n_layer"],
                heads=theirs["n_head"],
                context=theirs.get("n_positions", 1024),
                vocabulary=theirs["vocab_size"],
            )
            if theirs.get("n_inner") != 4 * found.d_model:
                found.mlp_width = theirs.get("n_inner")
        elif kind in ARCHITECTURES:
            needs = {"hidden_act": ("silu",)}
            found = sections.GPT(
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
                head_size=theirs.get("head_dim"),
                norm_eps=float(theirs.get("rms_norm_eps", 1e-6)),
                rope_base=rope_base_of(theirs),
            )
            if found.head_size == found.d_model // found.heads:
                found.head_size = None
            if kind != "llama":
                set_experts(found, theirs, kind)
            elif (width := theirs["intermediate_size"]) != usual_width(found):
                found.mlp_width = width
            check_llama(theirs)
        else:
            raise UserError(
                f"model_type is {kind!r}, and gpt2, {', '.join(ARCHITECTURES)} can be imported; train it as "
                f"--model.name hf"
            )
    except KeyError as missing:
        raise UserError(f"config.json has no {missing.args[0]}") from None
    for key in (*SIZE_KEYS, "experts", "active", "expert_width"):
        value, most = getattr(found, key), LARGEST.get(key, 10**9)
        if key == "experts" and value == 0:
            continue
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most):
            raise UserError(f"config.json gives {value!r} for what we call {key}, and it must be from 1 to {most:,}")
    for key, allowed in needs.items():
        if theirs.get(key, allowed[0]) not in allowed:
            raise UserError(f"{key} is {theirs[key]}, and ours is {allowed[0]}; train it as --model.name hf instead")
    return found


def rope_base_of(theirs: dict[str, Any]) -> float:
    return float(theirs.get("rope_theta") or (theirs.get("rope_parameters") or {}).get("rope_theta") or 10_000.0)


def set_experts(found: sections.GPT, theirs: dict[str, Any], kind: str) -> None:
    """Every block has them, in what can be imported."""
    count = theirs.get(EXPERTS_KEY[kind]) or theirs.get("num_local_experts") or theirs.get("num_experts")
    if not isinstance(count, int) or count < 1:
        raise UserError(f"config.json gives {count!r} experts, and it must be 1 or more")
    found.experts, found.active = count, theirs["num_experts_per_tok"]
    found.expert_width = theirs["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"]
    found.qk_norm = {"mixtral": "none", "olmoe": "all", "qwen3_moe": "head"}[kind]  # type: ignore[assignment]
    found.normalize = kind == "mixtral" or bool(theirs.get("norm_topk_prob", False))
    coefficient = theirs.get("router_aux_loss_coef") or 0.0
    found.balance, found.balance_coefficient = ("loss", float(coefficient)) if coefficient else ("none", 0.01)
    for key, plain in (("mlp_only_layers", ([], None)), ("decoder_sparse_step", (1, None)), ("clip_qkv", (None,))):
        if theirs.get(key) not in plain:
            raise UserError(f"{key} is {theirs[key]}, and ours has none; train it as --model.name hf instead")


def usual_width(found: sections.GPT) -> int:
    """Of an MLP, if the config says none."""
    return -(-8 * found.d_model // (3 * 64)) * 64 if isinstance(found.d_model, int) else 0


def check_llama(theirs: dict[str, Any]) -> None:
    rope = theirs.get("rope_parameters") or {}
    scaled = theirs.get("rope_scaling") or (rope.get("rope_type", "default") != "default" and rope)
    others = {
        "rope_scaling": (scaled or None, None),
        "sliding_window": (theirs.get("sliding_window") if theirs.get("use_sliding_window", True) else None, None),
        "attention_bias": (bool(theirs.get("attention_bias")), False),
        "mlp_bias": (bool(theirs.get("mlp_bias")), False),
    }
    for key, (is_, ours) in others.items():
        if is_ != ours:
            raise UserError(f"{key} is {is_}, and ours is {ours}; train it as --model.name hf instead")


def tensors_from_hf(config: sections.GPT, theirs: Tensors) -> Tensors:
    """By our names."""
    form = "gpt2" if config.norm == "layernorm" else "llama"
    if config.experts:
        form = MIXTURES[config.qk_norm, config.normalize]
    if form == "gpt2" and "wte.weight" in theirs:  # the published GPT-2 has no prefix
        theirs = {f"transformer.{name}": tensor for name, tensor in theirs.items()}
    found: Tensors = {}
    table = rows(form, config.layers, config.tied, config.experts)
    for row in table:
        missing = [name for name in row.theirs if name not in theirs]
        if missing:
            raise UserError(f"the weights have no {missing[0]}")
        parts = [theirs[name].t() if row.transposed else theirs[name] for name in row.theirs]
        if row.stacked:
            found[row.ours] = torch.stack(parts)
        else:
            found[row.ours] = torch.cat(parts).contiguous() if len(parts) > 1 else parts[0].contiguous()
    known = {name for row in table for name in row.theirs}
    surplus = [name for name in theirs if name not in known and not name.endswith(UNUSED)]
    if surplus and not (config.tied and surplus == ["lm_head.weight"]):
        raise UserError(f"the weights have {surplus[0]}, which the network of config.json has not")
    return found


UNUSED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Masks and tables that some folders hold, and no network needs."""
