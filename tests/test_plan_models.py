"""What the planner knows of a model: counted as it is built, read from strangers' files, traced."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import CNN, GPT, MLP, Config, Parallel, ResNet, Train, load_config
from lockstep.config.shipped import find_config
from lockstep.data import DataSpec
from lockstep.errors import UserError
from lockstep.models import build_model, forward_flops, parameter_count
from lockstep.plan.describe import network_of_gpt, network_of_hf
from lockstep.plan.known import KNOWN
from lockstep.plan.smaller import smaller
from lockstep.plan.trace import network_of_config, traced


@pytest.mark.parametrize("size", ["small", "xl", "2.7b"])
@pytest.mark.parametrize("llama", [False, True])
def test_a_gpt_is_counted_as_it_is_built(size: str, llama: bool) -> None:
    form = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "tied": False} if llama else {}
    config = GPT(size=size, context=256, vocabulary=1024, **form)  # type: ignore[arg-type]
    spec = DataSpec("tokens", (256,), 1024)
    with torch.device("meta"):
        model = build_model(config, spec)
    network = network_of_gpt(config)
    assert network.parameters == pytest.approx(parameter_count(model), rel=2e-3)  # biases
    counted = 3 * forward_flops(model, spec) / 256
    assert network.flops_per_token(counted_whole=True) == pytest.approx(counted, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "known"),
    [
        ("mixtral_8x7b", "mixtral-8x7b"),
        ("olmoe_1b_7b", "olmoe-1b-7b"),
        ("qwen3_30b_a3b", "qwen3-30b"),
        ("moe_small", None),
    ],
)
def test_a_mixture_of_experts_is_counted_as_it_is_built(config: str, known: str | None) -> None:
    model = load_config(find_config(config)).model
    assert isinstance(model, GPT)
    model.vocabulary = model.vocabulary or 256
    spec = DataSpec("tokens", (model.context,), model.vocabulary)
    with torch.device("meta"):
        built = build_model(model, spec)
    network = network_of_gpt(model)
    assert network.parameters == pytest.approx(parameter_count(built), rel=1e-4)  # norms of queries and keys
    flops = 3 * forward_flops(built, spec) / model.context
    assert network.flops_per_token(counted_whole=True) == pytest.approx(flops, rel=1e-6)
    if known is not None:
        assert network.parameters == pytest.approx(KNOWN[known]().parameters, rel=1e-4)


def test_dense_blocks_before_experts_and_shared_ones_are_counted() -> None:
    config = GPT(d_model=64, layers=3, heads=4, context=32, vocabulary=64, experts=8, active=2, expert_width=48)
    config.shared_experts, config.dense_layers, config.norm = 2, 1, "rmsnorm"
    with torch.device("meta"):
        built = build_model(config, DataSpec("tokens", (32,), 64))
    last_norm = 64
    assert network_of_gpt(config).parameters + last_norm == parameter_count(built)


@pytest.mark.parametrize("model", [ResNet(depth=18), ResNet(depth=50), CNN(), MLP(layers=4, width=64)])
def test_any_module_is_traced(model: ResNet | CNN | MLP) -> None:
    spec = DataSpec("images", (3, 32, 32), 10)
    network = network_of_config(Config(model=model), spec)
    with torch.device("meta"):
        built = build_model(model, spec)
    assert network.parameters == parameter_count(built)
    assert network.flops_per_token() == pytest.approx(3 * forward_flops(built, spec))


def test_a_module_that_cannot_run_is_one_line() -> None:
    with pytest.raises(UserError, match="cannot be traced on samples of 3"):
        traced(lambda: torch.nn.Linear(4, 4), (3,), "mine", None)


def test_known_models_have_the_parameters_that_they_are_called_by() -> None:
    billions = {"llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 406, "llama2-7b": 6.74, "deepseek-v3": 671}
    billions |= {"qwen3-30b": 30.5, "qwen3-235b": 235, "mixtral-8x7b": 46.7, "gpt-oss-120b": 117, "kimi-k2": 1026}
    billions |= {"deepseek-v2": 236, "nemotron4-340b": 341}
    for name, billion in billions.items():
        assert KNOWN[name]().parameters / 1e9 == pytest.approx(billion, rel=0.04), name


HF = {
    "llama": {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
              "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
             "n_positions": 1024},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
                 "intermediate_size": 24576, "vocab_size": 50432},
    "mixtral": {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
                "num_experts_per_tok": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
                    "num_attention_heads": 128, "intermediate_size": 18432, "vocab_size": 129280,
                    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
                    "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
                    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}  # fmt: skip
BILLIONS = {"llama": 8.03, "gpt2": 0.1244, "gpt_neox": 20.6, "mixtral": 46.7, "deepseek_v3": 671}


@pytest.mark.parametrize("kind", HF)
def test_hugging_face_configs_are_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF[kind]))
    network = network_of_hf(tmp_path, 2048)
    assert network.parameters / 1e9 == pytest.approx(BILLIONS[kind], rel=0.02)
    assert network.context == 2048


STRANGE = [
    {"hidden_size": 0},
    {"hidden_size": "many"},
    {"hidden_size": True},
    {"num_hidden_layers": 10**9},
    {"num_attention_heads": 33},
    {"num_key_value_heads": 7},
    {"intermediate_size": -5},
    {"vocab_size": 1e400},
    {"max_position_embeddings": -1},
    {"model_type": "abacus"},
    {"num_local_experts": 8, "num_experts_per_tok": 20},
    {"num_local_experts": 8, "first_k_dense_replace": 99},
    {"text_config": [1, 2]},
]


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, *(json.dumps({**HF["llama"], **odd}) for odd in STRANGE)])
def test_a_stranger_config_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="--hf"):
        network_of_hf(tmp_path, None)


def test_sizes_may_be_written_as_others_write_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**HF["llama"], "hidden_size": "4096", "vocab_size": 128256.0}))
    assert network_of_hf(tmp_path, 128).parameters / 1e9 == pytest.approx(8.03, rel=0.02)


def raises() -> torch.nn.Module:
    raise SystemExit(3)


@pytest.mark.parametrize("build", [lambda: None, raises, lambda: torch.nn.Linear(2, 2).to("nowhere")])
def test_a_module_that_cannot_be_built_is_one_line(build: Any) -> None:
    with pytest.raises(UserError):
        traced(build, (2,), "mine", None)


# ---- what would hold less --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "offered"),
    [
        (Parallel(data="ddp"), ["--train.accumulation 2", "--train.recompute full", "zero1", "zero2", "zero3"]),
        (Parallel(data="zero1", pp=2, schedule="zb-v"), ["--parallel.micro-batches 8", "--train.recompute full"]),
        (Parallel(data="bucketed", tp=4), ["--train.accumulation 2", "--train.recompute full"]),
    ],
    ids=["ddp", "zero1,pp=2:zb-v", "tp=4"],
)
def test_what_is_offered_to_a_run_without_memory_holds_less(parallel: Parallel, offered: list[str]) -> None:
    train = Train(batch_size=64, optimizer="adamw", precision="bf16")
    config = Config(model=GPT(size="small", context=1024, vocabulary=50304), train=train, parallel=parallel)
    line = smaller(config, 4, on_gpu=True)
    assert line is not None
    now, *changed = (float(number) for number in re.findall(r"(?:holds|:) (\d+\.\d\d)", line))
    assert changed
    assert all(gib < now for gib in changed), line
    assert all(flag in line for flag in offered), line
    assert ("zero" in line) == (parallel.tp == 1)
