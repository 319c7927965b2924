"""Ways of saving memory, the configs that use them, DeepSpeed's settings, and text from a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lockstep.config import GPT, Config, Data, Parallel, Train, load_config
from lockstep.config.shipped import FOLDER
from lockstep.data import DataSpec
from lockstep.errors import UserError
from lockstep.inference.deepspeed import through_deepspeed
from lockstep.inference.export import export_weights, load_model
from lockstep.inference.generate import generate
from lockstep.layout.world import World
from lockstep.models import build_model
from lockstep.models.lora import add_lora, merge_lora
from lockstep.models.loss import loss_for
from lockstep.models.recompute import recompute
from lockstep.strategies import Options, available_strategies
from lockstep.strategies.deepspeed_settings import deepspeed_settings, zero_settings
from lockstep.training.loop import train
from lockstep.verify import Request, Verdict, verify
from tests.ranks import LONG, on_ranks

SPEC = DataSpec("tokens", (8,), 32)
SMALL = GPT(d_model=16, layers=3, heads=2, context=8)
NEW = ("ddp_resnet_cifar10", "fsdp_resnet_cifar10", "ddp_mnist", "fsdp_transformer", "zero1", "zero2", "zero3", "lora")


def start_each_config(world: World) -> dict[str, int]:
    """Every config as it is, on data that need no download, for two steps."""
    found = {}
    for name in NEW:
        config = load_config(FOLDER / f"{name}.yaml")
        data = "digits" if "mnist" in name else "synthetic"
        config.data = replace(config.data, name=data, samples=16, shape=(3, 8, 8))
        config.train.steps, config.train.batch_size, config.train.evaluate_every = 2, 4, 0
        small = (
            {"width": 8} if "resnet" in name else {"context": 16, "d_model": 32} if config.model.name == "gpt" else {}
        )
        config.model = replace(config.model, **small)
        found[name] = train(world, config, quiet=True).steps
    return found


def savers_and_configs(world: World) -> tuple[list[Verdict], dict[str, int]]:
    names = ["bucketed", "zero1", "zero2", "zero3", "fsdp"]
    return verify(world, Request(names, steps=2, savers=True)), start_each_config(world)


@pytest.mark.slow
def test_every_saver_with_every_kind_of_sharding_and_every_config() -> None:
    verdicts, started = on_ranks(savers_and_configs, 2, timeout=LONG)[0]
    for verdict in verdicts:
        assert verdict.passed, f"{verdict.strategy}: {verdict.failures}"
    assert started == dict.fromkeys(NEW, 2)


@pytest.mark.parametrize("mode", ["full", "every", "attention"])
def test_recomputation_keeps_less_and_computes_the_same(mode: Any) -> None:
    tokens = torch.randint(32, (4, 8))
    kept, gradients = {}, {}
    for chosen in ("none", mode):
        model = recompute(build_model(SMALL, SPEC, seed=0), chosen)
        saved = 0

        def note(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(tokens).square().mean()
        kept[chosen] = saved
        loss.backward()
        gradients[chosen] = [p.grad for p in model.parameters()]
    assert kept[mode] < kept["none"]
    torch.testing.assert_close(gradients[mode], gradients["none"])


def test_lora_begins_as_the_model_and_merges_back() -> None:
    tokens = torch.randint(32, (4, 8))
    plain, adapted = (build_model(SMALL, SPEC, seed=0) for _ in range(2))
    names = [n for n, _ in plain.named_parameters()]
    add_lora(adapted, rank=2, alpha=8.0, targets=("qkv", "down"))
    torch.testing.assert_close(adapted(tokens), plain(tokens))
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 3
    assert all(".lora_" in n for n in trained)
    for name, parameter in adapted.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter)
    expected = adapted(tokens)
    merge_lora(adapted)
    assert [n for n, _ in adapted.named_parameters()] == names
    torch.testing.assert_close(adapted(tokens), expected)
    with pytest.raises(UserError, match="has 'wrong'; the model's linear layers are down, head, output, qkv, up"):
        add_lora(plain, 2, 8.0, ("wrong",))
    with pytest.raises(UserError, match="shared with another layer"):
        add_lora(plain, 2, 8.0, ("head",))


# ---- DeepSpeed's settings ------------------------------------------------------------------------------------

OPTIONS = Options(
    loss_for("tokens"),
    lambda p: torch.optim.SGD(p, 0.1),
    accumulation=2,
    clip_norm=1.0,
    precision="bf16",
    batch_size=32,
)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("deepspeed/*.json")), ids=lambda f: f.stem)
def test_the_ready_files_say_what_the_flags_say(file: Path) -> None:
    stage, _, offload = file.stem.removeprefix("zero").partition("_offload_")
    settings = json.loads(file.read_text())
    assert settings["zero_optimization"] == zero_settings(int(stage), offload or "none", "nvme")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_batch_size": 64}, "train_batch_size is 64, but train.batch_size means 32"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4, but train.accumulation means 2"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true, but train.precision means false"),
        ({"bf16": {"enabled": False}}, "bf16.enabled is false, but train.precision means true"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, but train.clip_norm means 1.0"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu is 4"),
        ({"optimizer": {"type": "Adam"}}, "has a section optimizer"),
    ],
)
def test_a_file_that_contradicts_our_config_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, **given}))
    with pytest.raises(UserError, match=words):
        deepspeed_settings(Parallel(data="deepspeed", deepspeed_config=str(file)), OPTIONS)


def test_files_that_are_no_settings(tmp_path: Path) -> None:
    for content, words in ((None, "cannot be read"), ("{", "is not valid JSON"), ("[]", "must hold an object")):
        file = tmp_path / "mine.json"
        if content is not None:
            file.write_text(content)
        with pytest.raises(UserError, match=words):
            deepspeed_settings(Parallel(data="deepspeed", deepspeed_config=str(file)), OPTIONS)


# ---- text from a checkpoint ------------------------------------------------------------------------------------


def test_generate_writes_the_same_from_checkpoint_and_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps on text, saved with adapters; the merged model writes alike from either."""
    model = GPT(d_model=32, layers=2, heads=2, context=16)
    config = Config(
        model, Data(name="text", max_bytes=20_000), Train(steps=4, batch_size=8, optimizer="adamw", lr=0.01)
    )
    config.lora.rank, config.checkpoint.every, config.train.evaluate_every = 2, 4, 0
    train(World(), config, tmp_path, quiet=True)
    prompt = torch.tensor(list(b"def main"))
    from_checkpoint, _, _ = load_model(tmp_path)
    greedy = generate(from_checkpoint.eval(), prompt, 30)
    assert len(greedy) == len(prompt) + 30
    export_weights(tmp_path, tmp_path / "model.safetensors")
    from_file, _, _ = load_model(tmp_path / "model.safetensors")
    assert torch.equal(generate(from_file.eval(), prompt, 30), greedy)
    drawn = [generate(from_file, prompt, 30, temperature=1.0, top_k=5, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    if "deepspeed" in available_strategies():
        pytest.importorskip("transformers")
        assert torch.equal(generate(through_deepspeed(from_file.eval()), prompt, 30).cpu(), greedy)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["lora"]["rank"] == 2
    monkeypatch.setattr("lockstep.training.prepare.SCHEME", "in a later way")
    with pytest.raises(UserError, match="adapters only, and the frozen weights follow from the seed in another way"):
        load_model(tmp_path)
