"""From what a person has (our config, a Hugging Face config.json) to what the planner knows of a model."""

from pathlib import Path
from typing import Any

from lockstep.config import GPT
from lockstep.config.gpt import gpt_shape
from lockstep.errors import UserError
from lockstep.plan.network import Network, latent_block, transformer, transformer_block
from lockstep.strange import json_of


def network_of_gpt(model: GPT) -> Network:
    """Ours, by its shape."""
    shape = gpt_shape(model, model.vocabulary or 256)
    gated, biases = shape.activation == "swiglu", shape.norm == "layernorm"
    attention = (shape.d_model, shape.heads)
    heads: dict[str, Any] = {"kv_heads": shape.kv_heads, "head_dim": shape.head_size, "biases": biases}
    parts = [(transformer_block(*attention, shape.mlp_width, gated=gated, **heads), shape.layers)]
    if shape.experts:
        routed = transformer_block(
            *(*attention, shape.expert_width),
            **heads,
            experts=shape.experts,
            visits=shape.active,
            shared_ffn=shape.shared_experts * shape.expert_width,
        )
        parts = [(parts[0][0], shape.dense_layers), (routed, shape.layers - shape.dense_layers)]
    return Network(
        name=f"gpt {model.size}",
        layers=tuple(part for part in parts if part[1]),
        hidden=shape.d_model,
        vocabulary=shape.vocabulary,
        context=shape.context,
        tied=shape.tied,
        positions=shape.context if shape.position == "learned" else 0,
    )


NOT_GATED = ("gpt2", "gpt_neox", "nemotron")
KNOWN_TYPES = (
    *NOT_GATED,
    *(
        "llama",
        "mistral",
        "ministral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "olmo",
        "olmo2",
        "olmoe",
        "granite",
    ),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss", "phi3", "internlm2", "smollm3"),
)
"""What model_type may be: decoders whose parts are these."""
LARGEST = 10**7
"""Of any size: beyond it is a slip, or malice."""


def size_of(value: Any, what: str, least: int = 1) -> int:
    """A whole number, also where it is written as 4096.0 or "4096"."""
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or number != number or not least <= number <= LARGEST or number != int(number):
        raise UserError(f"{what} is {str(value)[:40]!r}, but it must be a whole number from {least} to {LARGEST:,}")
    return int(number)


def network_of_hf(file: Path, context: int | None) -> Network:
    """Llama, Qwen, Mistral, GPT-2, GPT-NeoX and their kin, dense and with experts."""
    file = file / "config.json" if file.is_dir() else file
    try:
        values = json_of(file)
    except OSError as error:
        raise UserError(f"--hf {file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"--hf {file} is not valid JSON ({str(error)[:100]})") from None
    if not isinstance(values, dict):
        raise UserError(f"--hf {file} holds no object; give a model's config.json")
    values = values.get("text_config") or values
    if not isinstance(values, dict):
        raise UserError(f"--hf {file}: text_config must be an object")

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            if values.get(name) is not None:
                return size_of(values[name], f"--hf {file}: {name}", 0 if default == 0 else 1)
        if default is None:
            raise UserError(f"--hf {file} does not say {' or '.join(names)}")
        return default

    kind = str(values.get("model_type", ""))
    if kind not in KNOWN_TYPES:
        known = ", ".join(KNOWN_TYPES)
        raise UserError(f"--hf {file}: model_type {kind!r} is not known here; there are {known}; or trace the module")
    hidden, layers = number("hidden_size", "n_embd", "d_model"), number("num_hidden_layers", "n_layer", "num_layers")
    heads = number("num_attention_heads", "n_head")
    if layers > 10_000:
        raise UserError(f"--hf {file}: {layers:,} layers are more than any model has")
    kv, vocabulary = number("num_key_value_heads", default=heads), number("vocab_size")
    seen = context or number("max_position_embeddings", "n_positions", default=2048)
    gated = kind not in NOT_GATED
    ffn = number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=0)
    if hidden % heads and "head_dim" not in values:
        raise UserError(f"--hf {file}: {heads} heads do not divide hidden_size {hidden}, and head_dim is not given")
    if heads % kv:
        raise UserError(f"--hf {file}: {kv} key and value heads do not divide {heads} heads")
    tied = bool(values.get("tie_word_embeddings", kind in ("gpt2", "gemma", "gemma2")))
    dim = number("head_dim", default=max(1, hidden // heads))
    name = str(values.get("_name_or_path") or kind or file.parent.name)
    if not experts and "kv_lora_rank" not in values:
        positions = seen if kind in ("gpt2", "opt") else 0
        return transformer(name, layers, hidden, heads, ffn, vocabulary, seen, kv, gated, tied, positions, dim)
    sizes: dict[str, Any] = {
        "experts": experts,
        "visits": number("num_experts_per_tok", "num_experts_per_token", default=2),
        "shared_ffn": number("n_shared_experts", default=0) * number("moe_intermediate_size", default=ffn),
    }
    inside = number("moe_intermediate_size", default=ffn)
    dense = number("first_k_dense_replace", default=0)
    if sizes["visits"] > max(1, experts) or dense > layers:
        raise UserError(f"--hf {file}: more experts for a token than there are, or more dense layers than layers")
    if "kv_lora_rank" in values:
        ranks = (number("q_lora_rank", default=0), number("kv_lora_rank"))
        heads_of = (number("qk_nope_head_dim"), number("qk_rope_head_dim"), number("v_head_dim"))
        first = latent_block(hidden, heads, ffn, *ranks, *heads_of)
        rest = latent_block(hidden, heads, inside, *ranks, *heads_of, **sizes) if experts else first
    else:
        first = transformer_block(hidden, heads, ffn, kv, gated, dim)
        rest = transformer_block(hidden, heads, inside, kv, gated, dim, **sizes)
    parts = tuple(part for part in ((first, dense), (rest, layers - dense)) if part[1])
    return Network(name, parts, hidden, vocabulary, seen, tied)
