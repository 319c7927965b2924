"""Models that people call by name, with the shapes that their authors published."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.plan.network import Network, latent_block, transformer, transformer_block


def routed(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    dim: int,
    experts: int,
    visits: int,
    ffn: int,
    vocabulary: int,
    shared_ffn: int = 0,
    window: int | None = None,
    gflop_per_token: float | None = None,
    gated: bool = True,
    latent: int = 0,
) -> Network:
    """Every layer has experts. `window`: of every second layer's attention."""
    sizes: dict[str, Any] = {"experts": experts, "visits": visits, "shared_ffn": shared_ffn}
    sizes |= {"gated": gated, "latent": latent}
    whole = transformer_block(hidden, heads, ffn, kv_heads, head_dim=dim, **sizes)
    if window is None:
        made = Network(name, ((whole, layers),), hidden, vocabulary, 4096)
    else:
        near = transformer_block(hidden, heads, ffn, kv_heads, head_dim=dim, window=window, **sizes)
        made = Network(name, ((near, layers // 2), (whole, layers - layers // 2)), hidden, vocabulary, 4096)
    return with_known_work(made, gflop_per_token)


def latent(
    name: str,
    layers: int,
    dense: int,
    hidden: int,
    heads: int,
    dense_ffn: int,
    experts: int,
    visits: int,
    ffn: int,
    shared_ffn: int,
    vocabulary: int,
    q_rank: int = 1536,
    extra_layers: float = 0.0,
) -> Network:
    """DeepSeek's: latent attention, some dense layers first, then experts."""
    first = latent_block(hidden, heads, dense_ffn, q_rank, 512)
    rest = latent_block(hidden, heads, ffn, q_rank, 512, experts=experts, visits=visits, shared_ffn=shared_ffn)
    made = ((first, dense), (rest, layers - dense)) if dense else ((rest, layers),)
    return Network(name, made, hidden, vocabulary, 4096, extra_layers=extra_layers)


def with_known_work(network: Network, gflop_per_token: float | None) -> Network:
    """The FLOP per token that its authors count, where its layers are of kinds that are only alike (Mamba)."""
    if gflop_per_token is None:
        return network
    return replace(network, work=gflop_per_token * 1e9 / network.flops_per_token())


def nemotron3(
    name: str, layers: int, hidden: int, experts: int, visits: int, ffn: int, latent: int, gflop: float
) -> Network:
    """Mamba, attention and experts mixed: described as attention with experts, with the FLOP per token that is
    published.
    """
    return routed(
        *(name, layers, hidden, 32, 2, 128, experts, visits, ffn, 131072, 2 * ffn),
        gflop_per_token=gflop,
        gated=False,
        latent=latent,
    )


KNOWN: dict[str, Callable[[], Network]] = {
    "nemotron4-15b": lambda: transformer("Nemotron4-15B", 32, 6144, 48, 24576, 256000, 4096, 8, gated=False),
    "nemotron4-340b": lambda: transformer("Nemotron4-340B", 96, 18432, 96, 73728, 256000, 4096, 8, gated=False),
    "nemotron-8b": lambda: transformer("Nemotron-8B", 32, 4096, 32, 16384, 256000, 4096, gated=False),
    "gpt3-20b": lambda: transformer("GPT3-20B", 44, 6144, 48, 24576, 51200, 2048, gated=False, tied=True),
    "gpt3-175b": lambda: transformer("GPT3-175B", 96, 12288, 96, 49152, 51200, 2048, gated=False, tied=True),
    "llama2-7b": lambda: transformer("Llama 2 7B", 32, 4096, 32, 11008, 32000, 4096),
    "llama2-13b": lambda: transformer("Llama 2 13B", 40, 5120, 40, 13824, 32000, 4096),
    "llama2-70b": lambda: transformer("Llama 2 70B", 80, 8192, 64, 28672, 32000, 4096, 8),
    "llama3-8b": lambda: transformer("Llama 3 8B", 32, 4096, 32, 14336, 128256, 8192, 8),
    "llama3-70b": lambda: transformer("Llama 3 70B", 80, 8192, 64, 28672, 128256, 8192, 8),
    "llama3-405b": lambda: transformer("Llama 3.1 405B", 126, 16384, 128, 53248, 128256, 8192, 8),
    "deepseek-v2": lambda: latent("DeepSeek V2", 60, 1, 5120, 128, 12288, 160, 6, 1536, 3072, 102400),
    "deepseek-v3": lambda: latent("DeepSeek V3", 61, 3, 7168, 128, 18432, 256, 8, 2048, 2048, 129280, extra_layers=1),
    "kimi-k2": lambda: latent("Kimi K2", 61, 1, 7168, 64, 18432, 384, 8, 2048, 2048, 163840),
    "qwen3-30b": lambda: routed("Qwen3 30B-A3B", 48, 2048, 32, 4, 128, 128, 8, 768, 151936),
    "qwen3-235b": lambda: routed("Qwen3 235B-A22B", 94, 4096, 64, 4, 128, 128, 8, 1536, 151936),
    "gpt-oss-120b": lambda: routed("GPT OSS 120B", 36, 2880, 64, 8, 64, 128, 4, 2880, 201088, window=128),
    "olmoe-1b-7b": lambda: routed("OLMoE 1B-7B", 16, 2048, 16, 16, 128, 64, 8, 1024, 50304),
    "mixtral-8x7b": lambda: routed("Mixtral 8x7B", 32, 4096, 32, 8, 128, 8, 2, 14336, 32000),
    "mixtral-8x22b": lambda: routed("Mixtral 8x22B", 56, 6144, 48, 8, 128, 8, 2, 16384, 32768),
    "nemotron3-nano": lambda: nemotron3("Nemotron 3 Nano", 26, 2688, 128, 6, 1856, 0, 22.3),
    "nemotron3-lightning": lambda: nemotron3("Nemotron 3.5 Lightning", 26, 2688, 128, 6, 1856, 0, 28.2),
    "nemotron3-super": lambda: nemotron3("Nemotron 3 Super", 44, 4096, 512, 22, 2688, 1024, 84.8),
    "nemotron3-ultra": lambda: nemotron3("Nemotron 3 Ultra", 54, 8192, 512, 22, 5120, 2048, 365.0),
    "deepseek-v4-flash": lambda: with_known_work(
        latent("DeepSeek V4 Flash", 43, 1, 4096, 64, 12288, 256, 8, 2048, 2048, 129280), 91.0
    ),
}
PATTERNS = (
    (r"nemotron.?4.?15b", "nemotron4-15b"),
    (r"nemotron.?4.?340b", "nemotron4-340b"),
    (r"nemotron.?3.?nano", "nemotron3-nano"),
    (r"nemotron.?3.?5?.?lightning", "nemotron3-lightning"),
    (r"nemotron.?3.?super", "nemotron3-super"),
    (r"nemotron.?3.?ultra", "nemotron3-ultra"),
    (r"nemotron.?8b", "nemotron-8b"),
    (r"gpt.?oss.?120b", "gpt-oss-120b"),
    (r"gpt.?3.?20b", "gpt3-20b"),
    (r"gpt.?3.?175b", "gpt3-175b"),
    (r"deepseek.?v2", "deepseek-v2"),
    (r"deepseek.?v3", "deepseek-v3"),
    (r"deepseek.?v4.?flash", "deepseek-v4-flash"),
    (r"kimi.?k2", "kimi-k2"),
    (r"qwen.?3.?30b", "qwen3-30b"),
    (r"qwen.?3.?235b", "qwen3-235b"),
    (r"olmoe", "olmoe-1b-7b"),
    (r"mixtral.?8x7b", "mixtral-8x7b"),
    (r"mixtral.?8x22b", "mixtral-8x22b"),
    (r"llama.?3(\.1)?.?8b", "llama3-8b"),
    (r"llama.?3(\.\d)?.?70b", "llama3-70b"),
    (r"llama.?3(\.1)?.?405b", "llama3-405b"),
    (r"llama.?2.?7b", "llama2-7b"),
    (r"llama.?2.?13b", "llama2-13b"),
    (r"llama.?2.?70b", "llama2-70b"),
)


def known_model(name: str) -> Network | None:
    """By a name as people write it: `DeepSeekV3`, `Qwen3_30B_a3B`."""
    for pattern, key in PATTERNS:
        if re.search(pattern, name, re.IGNORECASE):
            return KNOWN[key]()
    return None
