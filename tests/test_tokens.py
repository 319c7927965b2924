"""Token ids in a file that is mapped into memory."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.cli import main
from lockstep.config import GPT, Config, Data, Train
from lockstep.data import build_data, tokens
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.training.loop import train
from tests.ranks import on_ranks

TEXT = {
    "b.txt": b"second\n" * 40,
    "a.txt": "first, and a word: gr\u00fc\u00df\n".encode() * 30,
    "c/d.txt": b"no end of line",
}


@pytest.fixture
def books(tmp_path: Path) -> Path:
    for name, text in TEXT.items():
        (tmp_path / "books" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / name).write_bytes(text)
    return tmp_path / "books"


def config(folder: Path) -> Config:
    data = Data("tokens", path=str(folder))
    return Config(GPT(d_model=16, layers=1, heads=2, context=8), data, Train(steps=6, batch_size=8, log_every=1))


def test_bytes_are_tokens(books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "PIECE", 50)  # files in several pieces
    assert main(["tokenize", str(books), "--out", str(tmp_path / "ids"), "--test-share", "0.25"]) == 0
    whole = b"".join(TEXT[name] for name in sorted(TEXT))
    assert (tmp_path / "ids" / "tokens.bin").read_bytes() == whole
    dataset = build_data(config(tmp_path / "ids"))
    assert dataset.spec.classes == 256
    cut = int(len(whole) * 0.75)
    assert len(dataset.train) == (cut - 1) // 8
    batch = dataset.train.batch(torch.tensor([3, 0]))
    assert bytes(batch.inputs[0].tolist()) == whole[24:32]
    assert bytes(batch.targets[1].tolist()) == whole[1:9]
    last = dataset.test.batch(torch.tensor([len(dataset.test) - 1]))
    assert bytes(last.inputs[0].tolist()) in whole[cut:]
    again = pickle.loads(pickle.dumps(dataset.train))
    assert torch.equal(again.batch(torch.tensor([3])).inputs, batch.inputs[:1])


def test_a_tokenizer_of_any_size(books: Path, tmp_path: Path) -> None:
    package = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "second": 1, "first": 2, **{f"word{i}": i + 3 for i in range(70_000)}}
    made = package.Tokenizer(package.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = package.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    flags = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--out", str(tmp_path / "ids")]
    assert main(["tokenize", str(books / "b.txt"), str(books / "a.txt"), *flags]) == 0
    about = json.loads((tmp_path / "ids" / "tokens.json").read_text())
    assert (about["dtype"], about["vocabulary"]) == ("uint32", 70_003)
    ids = np.fromfile(tmp_path / "ids" / "tokens.bin", dtype=np.uint32)
    assert ids[:40].tolist() == [1] * 40
    assert ids[40] == 2


def losses(world: World, folder: str, workers: int) -> list[float]:
    given = config(Path(folder))
    given.data.workers = workers
    return train(world, given, quiet=True).losses


def test_every_number_of_ranks_reads_the_same(books: Path, tmp_path: Path) -> None:
    main(["tokenize", str(books), "--out", str(tmp_path / "ids")])
    (alone,) = on_ranks(losses, 1, str(tmp_path / "ids"), 0)
    for found in on_ranks(losses, 2, str(tmp_path / "ids"), 1):
        assert found == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tokenize", "needs text and a folder to make"),
        ("tokenize nowhere --out x", "nowhere does not exist"),
        ("tokenize {books} --out x --test-share 2", "must be between 0 and 1"),
        ("tokenize {books} --out {books} --tokenizer nowhere.json", "cannot be read"),
        ("train --model.name gpt --data.name tokens --device cpu", "needs data.path, a folder that lockstep tokenize"),
        ("train --model.name gpt --data.name tokens --data.path {books} --device cpu", "has no tokens.json"),
    ],
)
def test_mistakes_are_one_line(words: str, said: str, books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.format(books=books).split()) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_what_was_cut_short_or_spoiled_is_refused(books: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ids"
    main(["tokenize", str(books), "--out", str(folder)])
    with pytest.raises(UserError, match="is there already"):
        tokens.write_tokens([books / "a.txt"], folder)
    about = json.loads((folder / "tokens.json").read_text())
    for spoiled in ({**about, "count": about["count"] + 1}, {**about, "dtype": "float64"}, {"count": 3}, [], None):
        (folder / "tokens.json").write_text(json.dumps(spoiled))
        with pytest.raises(UserError, match=r"tokens\.(bin|json)"):
            build_data(config(folder))
    assert not list(tmp_path.glob(".ids.part*"))
