"""Hugging Face's causal language models: trained as they are, and our GPT to and from GPT-2 and Llama."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.cli import main
from lockstep.config import GPT, HF, Config, Data, Train, load_config
from lockstep.errors import UserError
from lockstep.inference.export import export_hf, import_hf, load_model
from lockstep.layout.world import World
from lockstep.models import build_model
from lockstep.models.hf import build_hf
from lockstep.training.loop import train
from lockstep.verify import Request, verify
from tests.ranks import on_ranks

transformers: Any = pytest.importorskip("transformers")
TOKENS = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
LLAMA = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu"}
OURS = {
    "gpt2": {},
    "llama": {**LLAMA, "tied": False, "kv_heads": 2},
    "llama, tied": {**LLAMA, "tied": True},
    "llama, wide": {**LLAMA, "tied": False, "kv_heads": 2, "mlp_width": 112},
    "gpt2, narrow": {"mlp_width": 72},
    "mixtral": {**LLAMA, "tied": False, "kv_heads": 2, "experts": 4, "expert_width": 24, "rope_base": 1e6},
    "olmoe": {**LLAMA, "tied": False, "experts": 4, "expert_width": 24, "qk_norm": "all", "normalize": False},
    "qwen3_moe": {
        **{**LLAMA, "tied": False, "kv_heads": 2, "experts": 4, "expert_width": 24, "qk_norm": "head"},
        **{"head_size": 16, "norm_eps": 1e-6, "active": 3},
    },
}
THEIRS = {
    "llama": {"intermediate_size": 80},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    "olmoe": {"num_experts": 4, "intermediate_size": 24, "pad_token_id": None, "eos_token_id": None},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama without weights, a GPT-2 with some."""
    home = tmp_path_factory.mktemp("hf")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=259, max_position_embeddings=64)
    llama.save_pretrained(home / "llama")
    torch.manual_seed(0)
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=300)
    transformers.AutoModelForCausalLM.from_config(gpt2).save_pretrained(home / "gpt2")
    return {"llama": home / "llama", "gpt2": home / "gpt2"}


def verified(world: World, folder: str, names: list[str]) -> list[list[str]]:
    request = Request(names, steps=2, model=HF(path=folder, context=16))
    return [verdict.failures for verdict in verify(world, request)]


@pytest.mark.parametrize(
    ("name", "ranks", "strategies"),
    [
        ("llama", 2, ["bucketed", "zero3", "single,tp=2"]),
        pytest.param("llama", 4, ["fsdp,tp=2"], marks=pytest.mark.slow),
        pytest.param("gpt2", 2, ["zero2", "fsdp"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_they_train_as_one_process_would(
    name: str, ranks: int, strategies: list[str], folders: dict[str, Path]
) -> None:
    for failures in on_ranks(verified, ranks, str(folders[name]), strategies):
        assert failures == [[]] * len(strategies)


def test_a_run_starts_from_their_weights_and_is_theirs_again(folders: dict[str, Path], tmp_path: Path) -> None:
    config = Config(HF(path=str(folders["gpt2"]), context=16, dropout=0.0), Data("text", max_bytes=5000))
    config.train, config.checkpoint.every = Train(steps=2, batch_size=4, lr=0.0, evaluate_every=0), 2
    train(World(), config, tmp_path / "run", quiet=True)
    assert export_hf(tmp_path / "run", tmp_path / "again") > 0
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        for folder in (folders["gpt2"], tmp_path / "again")
    )
    assert torch.equal(before(TOKENS).logits, after(TOKENS).logits)


@pytest.mark.parametrize("form", OURS)
def test_our_gpt_is_theirs_and_comes_back(form: str, tmp_path: Path) -> None:
    model = GPT(d_model=48, layers=2, heads=4, context=16, **OURS[form])
    config = Config(model, Data("text", max_bytes=5000), Train(steps=2, batch_size=4, optimizer="adamw", lr=1e-2))
    config.checkpoint.every = 2
    train(World(), config, tmp_path / "run", quiet=True)
    ours = load_model(tmp_path / "run")[0].eval()
    assert main(["export", str(tmp_path / "run"), "--format", "hf", "--out", str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert torch.allclose(theirs(TOKENS).logits, ours(TOKENS), atol=1e-5)
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]) == 0
    back = load_model(tmp_path / "back" / "model.safetensors")[0].eval()
    assert torch.equal(back(TOKENS), ours(TOKENS))
    assert main(["export", str(tmp_path / "back"), "--format", "hf", "--out", str(tmp_path / "again")]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)
    assert main(["export", str(tmp_path / "back")]) == 2, "it would write over what it reads"
    steps = ["--train.steps", "1", "--train.lr", "0.0", "--train.batch-size", "2", "--checkpoint.every", "1"]
    start = ["train", str(tmp_path / "back" / "config.yaml"), "--resume", str(tmp_path / "back")]
    assert main([*start, *steps, "--data.name", "text", "--data.max-bytes", "5000"]) == 0
    assert torch.equal(load_model(tmp_path / "back")[0].eval()(TOKENS), ours(TOKENS))
    assert replace(load_config(tmp_path / "back" / "config.yaml").model, kv_heads=None, vocabulary=None) == replace(
        model, kv_heads=None
    )


def test_their_own_weights_give_their_own_logits(folders: dict[str, Path], tmp_path: Path) -> None:
    import_hf(folders["gpt2"], tmp_path / "ours")
    ours = load_model(tmp_path / "ours" / "model.safetensors")[0].eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders["gpt2"]).eval()
    tokens = torch.randint(300, (2, 20))
    assert torch.allclose(theirs(tokens).logits, ours(tokens), atol=1e-5)


@pytest.mark.parametrize("form", THEIRS)
def test_their_mixtures_give_their_own_logits(form: str, tmp_path: Path) -> None:
    """Random ones of their own, in and out again."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"vocab_size": 259, "max_position_embeddings": 64, "num_experts_per_tok": 2}
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(form, **sizes, **more, **THEIRS[form])
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours")
    ours = load_model(tmp_path / "ours" / "model.safetensors")[0].eval()
    assert torch.allclose(theirs(TOKENS).logits, ours(TOKENS), atol=1e-5)
    assert main(["export", str(tmp_path / "ours"), "--format", "hf", "--out", str(tmp_path / "again")]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_layer": "two"}, "'two' for what we call layers"),
        ({"n_layer": 0}, "0 for what we call layers"),
        ({"n_layer": 1}, "the weights have transformer.h.1"),
        ({"n_layer": 3}, "the weights have no transformer.h.2"),
        ({"n_embd": 16}, "config.json speaks of"),
        ({"n_head": 0}, "0 for what we call heads"),
        ({"vocab_size": None}, "cannot be imported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ],
)
def test_a_config_of_another_network_is_refused(
    change: dict[str, Any], said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """By `import`; and by `hf`, which would begin with random layers."""
    spoiled = tmp_path / "spoiled"
    shutil.copytree(folders["gpt2"], spoiled)
    about = json.loads((spoiled / "config.json").read_text())
    (spoiled / "config.json").write_text(json.dumps({**about, **change}))
    with pytest.raises(UserError, match=re.escape(said)):
        import_hf(spoiled, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    if change.get("n_layer") in (3, "two") or "n_embd" in change:
        with pytest.raises(UserError, match=r"model\.path"):
            build_hf(HF(path=str(spoiled)))


def test_what_ours_is_not_is_refused(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    mistakes = {
        "hidden_act is gelu, and ours is silu": {"hidden_act": "gelu"},
        "attention_bias is True, and ours is False": {"attention_bias": True},
        "config.json speaks of": {"intermediate_size": 99},
        "'wide' for what we call mlp_width": {"intermediate_size": "wide"},
        "model_type is 'mamba'": {"model_type": "mamba"},
    }
    build = GPT(d_model=48, layers=1, heads=4, context=16, vocabulary=256, **OURS["llama"])
    config = Config(build, Data("text", max_bytes=5000), Train(steps=1, batch_size=2, evaluate_every=0))
    config.checkpoint.every = 1
    train(World(), config, tmp_path / "run", quiet=True)
    export_hf(tmp_path / "run", other)
    about = json.loads((other / "config.json").read_text())
    for said, change in mistakes.items():
        (other / "config.json").write_text(json.dumps({**about, **change}))
        assert main(["import", str(other), "--out", str(tmp_path / "new")]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
    assert main(["import", str(folders["llama"]), "--out", str(tmp_path / "new")]) == 2
    assert "has no *.safetensors" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--format", "hf", "--out", str(other)]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "model.name hf needs model.path"),
        ("--model.path nowhere", "has no config.json that can be read"),
        ("--model.path {other}", "is not a language model's config"),
    ],
)
def test_mistakes_are_one_line(flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = f"train --model.name hf --data.name text --device cpu {flags.format(other=tmp_path)}"
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_ours_alone() -> None:
    """The names on both sides are all that there are."""
    from lockstep.data import DataSpec
    from lockstep.models.convert import rows

    for form, options in OURS.items():
        model: nn.Module = build_model(GPT(d_model=48, layers=2, heads=4, **options), DataSpec("tokens", (16,), 256))
        tied = bool(options.get("tied", True))
        assert {row.ours for row in rows(form.split(",")[0], 2, tied, options.get("experts", 0))} == set(
            dict(model.named_parameters())
        )
