"""Text from a GPT: the same tokens with a cache and without, in batches and one by one, on one rank and on several."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep import tensor_parallel
from lockstep.cli import main
from lockstep.config import GPT, Config, Data, Train
from lockstep.data import DataSpec
from lockstep.inference.deepspeed import through_deepspeed
from lockstep.inference.generate import generate, generate_batch
from lockstep.layout.world import World
from lockstep.models import build_model
from lockstep.training.loop import train
from tests.ranks import on_ranks

FORMS = {
    "gpt": {},
    "llama": {"kv_heads": 2, "tied": False, "norm": "rmsnorm", "position": "rope", "activation": "swiglu"},
}
PROMPTS = [torch.tensor(list(text)) for text in (b"def main(", b"i", b"import os, sys", b"xyz")]


def network(form: str) -> nn.Module:
    made = build_model(GPT(d_model=32, layers=2, heads=4, context=32, **FORMS[form]), DataSpec("tokens", (32,), 256), 1)
    return made.double().eval()


@pytest.mark.parametrize("form", list(FORMS))
def test_a_cache_changes_nothing(form: str) -> None:
    """Also beyond the context of 32, where the text is seen from its end."""
    model = network(form)
    for temperature in (0.0, 1.0):
        for prompt in PROMPTS:
            plain = generate(model, prompt, 40, temperature, cache=False)
            assert torch.equal(generate(model, prompt, 40, temperature), plain)
            assert torch.equal(generate(model, prompt, 40, temperature, cache=False), plain)  # the model is as before
        assert temperature == 0 or len(set(plain.tolist())) > 20  # greedy, an untrained model soon repeats itself


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_writes_what_each_would(cache: bool, temperature: float) -> None:
    model = network("llama")
    together = generate_batch(model, PROMPTS, 20, temperature, top_k=5, cache=cache)
    for row, (prompt, text) in enumerate(zip(PROMPTS, together, strict=True)):
        assert torch.equal(generate(model, prompt, 20, temperature, top_k=5, seed=row, cache=cache), text)


def test_what_was_never_written_is_never_read() -> None:
    """Deterministic mode fills new memory with NaN, and a masked NaN would still spoil a sum."""
    model, expected = network("gpt"), [generate(network("gpt"), p, 12, cache=False) for p in PROMPTS]
    torch.use_deterministic_algorithms(True)
    try:
        found = generate_batch(model, PROMPTS, 12)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_any_temperature_gives_tokens() -> None:
    model = network("gpt")
    greedy = generate(model, PROMPTS[0], 5)
    assert torch.equal(generate(model, PROMPTS[0], 5, temperature=1e-40, top_k=3), greedy)
    assert generate_batch(model, PROMPTS[:1], 30, temperature=1e6, vocabulary=128)[0].max() < 128


def test_a_token_costs_one_tokens_work() -> None:
    model, seen = network("gpt"), []
    model.get_submodule("blocks.0").register_forward_hook(
        lambda _module, inputs, _output: seen.append(inputs[0].shape[1])
    )
    generate(model, PROMPTS[2], 5)
    assert seen == [len(PROMPTS[2]), 1, 1, 1, 1]


def write_in_parts(world: World) -> dict[str, list[Tensor]]:
    return {form: generate_batch(tensor_parallel(network(form)), PROMPTS, 25, temperature=1.0) for form in FORMS}


def write_by_deepspeed(world: World) -> dict[str, list[Tensor]]:
    found = {}
    for form in FORMS:
        engine = through_deepspeed(network(form).float())
        found[form] = generate_batch(engine, PROMPTS, 25) + generate_batch(engine, PROMPTS, 25, cache=False)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_ranks_write_the_same(ranks: int) -> None:
    """With 4 ranks and 2 heads of keys, ranks share them."""
    whole = {form: generate_batch(network(form), PROMPTS, 25, temperature=1.0) for form in FORMS}
    for found in on_ranks(write_in_parts, ranks):
        for form, texts in whole.items():
            for mine, theirs in zip(found[form], texts, strict=True):
                assert torch.equal(mine, theirs), form


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_deepspeed_writes_the_same(ranks: int) -> None:
    pytest.importorskip("deepspeed")
    for found in on_ranks(write_by_deepspeed, ranks):
        for form, texts in found.items():
            whole = generate_batch(network(form).float(), PROMPTS, 25)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(texts, 2 * whole, strict=True)), form


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = Config(GPT(d_model=32, layers=1, heads=2, context=16), Data(name="text", max_bytes=5000), Train(steps=2))
    config.checkpoint.every, config.train.evaluate_every = 2, 0
    train(World(), config, folder, quiet=True)
    return folder


def test_the_command(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    common = ["generate", str(run), "--device", "cpu", "--tokens", "12", "--prompt", "def ", "a"]
    said = []
    for flags in ([], ["--no-cache"], ["--nproc", "2"]):
        assert main([*common, *flags]) == 0
        said.append(capfdbinary.readouterr())
    assert said[0].out.startswith(b"def ")
    assert said[0].out == said[1].out == said[2].out
    assert b"24 tokens in " in said[0].err
    assert b"1 rank, with a key/value cache" in said[0].err
    assert b"1 rank, without a key/value cache" in said[1].err
    assert b"2 ranks, with a key/value cache" in said[2].err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--tokens", "0"], "--tokens is 0, but it must be 1 or more"),
        (["--top-k", "0"], "--top-k is 0, but it must be 1 or more"),
        (["--temperature", "nan"], "--temperature is nan, but it must be 0 or more"),
        (["--seed", "99999999999999999999"], "--seed is 99999999999999999999, but it must be from 0 to"),
        (["--nproc", "3"], "parallel.tp 3 does not divide model.heads, 2; degrees that do: 1, 2"),
    ],
)
def test_mistakes_are_one_line(run: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "--device", "cpu", *flags]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
