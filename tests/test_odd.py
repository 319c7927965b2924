"""Odd files, odd values, odd code: one line that says what is wrong, at once, and no traceback."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.cli import main
from lockstep.config import load_config
from lockstep.data.user_data import drawn_alike
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.parallel.tensor.propose import proposed_plan
from lockstep.strange import json_of, shown
from lockstep.strategies.tensor import check_tensor
from lockstep.training.prepare import load_data
from tests.ranks import on_ranks

# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_file_is_no_pipe_no_flood_and_no_abyss(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "deep", "folder"):
        with pytest.raises(ValueError, match=r"no ordinary file|nested too deeply"):
            json_of(tmp_path / name)
    with pytest.raises(OSError, match="No such file"):
        json_of(tmp_path / "absent")


def test_nothing_but_text_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("a\x1b[31mb\x07\n") == "a\\x1b[31mb\\x07\n"
    assert main(["train", "\x1b[31mabsent.yaml"]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        *({"count": value} for value in ("ten", -1, 0, True, 1.5, None)),
        *({"dtype": value} for value in ("float32", "object", 3, None)),
        *({"vocabulary": value} for value in (0, "many", -5, [])),
        *({"test_share": value} for value in (0, 1, 2.5, "half", None, [0.1])),
        {"more": 1},
    ],
    ids=str,
)
def test_odd_values_of_tokens_json_are_one_line(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words " * 400)
    folder = tmp_path / "tokens"
    assert main(["tokenize", str(text), "--out", str(folder)]) == 0
    about = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps({**about, **change}))
    command = [
        "train",
        "--model.name",
        "gpt",
        "--model.context",
        "16",
        "--data.name",
        "tokens",
        "--data.path",
        str(folder),
    ]
    assert main([*command, "--train.steps", "1"]) == 2
    assert "tokens.json" in capsys.readouterr().err


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words " * 400)
    assert main(["tokenize", str(text), "--out", str(tmp_path / "tokens")]) == 0
    file = tmp_path / "tokens" / "tokens.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocabulary": 50}))
    command = ["train", "--model.name", "gpt", "--model.d-model", "16", "--model.layers", "1", "--model.heads", "2"]
    command += ["--model.context", "16", "--data.name", "tokens", "--data.path", str(tmp_path / "tokens")]
    assert main([*command, "--train.steps", "2", "--run-dir", str(tmp_path / "run")]) == 2
    assert "has the token 119, and tokens.json a vocabulary of 50" in capsys.readouterr().err


def test_a_config_may_merge_what_it_has_said(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("data: &d {name: synthetic, samples: 64}\ntrain:\n  lr: 0.5\nlora: {}\n")
    assert load_config(file).data.samples == 64
    file.write_text("train: {<<: {lr: 0.5, steps: 3}, lr: 0.25}\n")
    assert (load_config(file).train.lr, load_config(file).train.steps) == (0.25, 3)


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --train.lr -1", "train.lr is -1, but it must be from 0 to"),
        ("train --train.seed 20000000000000", "train.seed is 20000000000000"),
        ("train --backend foo --train.steps 1", "--backend foo is not available here"),
        ("schedule 1f1b --stages 100000000 --micro-batches 8", "passes that can be drawn"),
        ("train --train.optimizer os:system --train.steps 1", "train.optimizer os:system cannot be made: TypeError"),
    ],
)
def test_a_value_that_cannot_be_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


def test_a_model_name_that_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {name: [cnn]}\n")
    with pytest.raises(UserError, match=r"model.name is \['cnn'\]"):
        load_config(tmp_path / "c.yaml")


def test_a_billion_layers_are_not_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"model_type": "gpt2", "n_embd": 8, "n_layer": 10**9, "n_head": 2, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert main(["import", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "for what we call layers, and it must be from 1 to 10,000" in capsys.readouterr().err


# ---- models and data -----------------------------------------------------------------------------------------------


class Planned(nn.Module):
    """Says how it is cut, and has none of our models' attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x.flatten(1)).relu())
        return y

    def tensor_plan(self) -> dict[str, str]:
        return {"up": "column", "down": "row"}


class Row(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.out(self.embedding(tokens))
        return y


def unseeded() -> Any:
    """Random numbers without a seed: the same on every rank all the same."""
    images = torch.randn(60, 1, 4, 4)
    return (images, images.flatten(1)[:, :4].argmax(1)), (images[:9], images[:9].flatten(1)[:, :4].argmax(1))


def tokens() -> Any:
    found = torch.randint(20, (60, 5))
    return (found[:, :-1], found[:, 1:]), (found[:9, :-1], found[:9, 1:])


@pytest.mark.parametrize(
    ("model", "data", "strategies"),
    [
        ("Planned", "unseeded", ["single,tp=2"]),
        ("Row", "unseeded", ["single,pp=2"]),
        ("Sparse", "tokens", ["zero1", "zero2", "zero3"]),
    ],
)
def test_a_users_plan_a_users_row_and_sparse_gradients_verify(
    model: str, data: str, strategies: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    here = "tests.test_odd:"
    command = ["verify", "--model.import", here + model, "--data.import", here + data, "--world-size", "2"]
    assert main([*command, "--steps", "2", "--precision", "fp32", "--strategies", *strategies]) == 0
    assert f"{len(strategies)} of {len(strategies)} passed" in capsys.readouterr().out


def test_a_plan_is_proposed_where_a_model_has_none() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.out_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    blocks = nn.ModuleDict({"blocks": nn.ModuleList([Attention(), Attention()])})
    assert proposed_plan(blocks) == {"blocks.*.q_proj": "column", "blocks.*.out_proj": "row"}
    assert proposed_plan(Row()) == {"1": "column", "3": "row"}
    assert proposed_plan(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))) == {}
    with pytest.raises(UserError, match=r'it might be def tensor_plan\(self\): return \{"1": "column", "3": "row"\}'):
        check_tensor(Row(), 2, sequence=False)


def by_rank() -> Any:
    """A user who shards by hand: every rank has other samples."""
    images = torch.full((8, 1, 4, 4), float(os.environ.get("RANK", "0")))
    return (images, torch.arange(8) % 4), (images, torch.arange(8) % 4)


def loaded(world: World) -> str:
    try:
        load_data(world, load_config_of("by_rank"))
    except UserError as error:
        return str(error)
    return ""


def load_config_of(data: str) -> Any:
    config = load_config()
    config.data.name, config.data.import_ = "own", f"tests.test_odd:{data}"
    return config


def test_ranks_that_get_other_data_are_told_so() -> None:
    for said in on_ranks(loaded, 2):
        assert "gives other samples on rank 1 than on rank 0" in said


def test_drawing_data_leaves_training_its_random_numbers() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with drawn_alike(0):
        torch.rand(7)
    assert torch.equal(torch.rand(3), expected)
