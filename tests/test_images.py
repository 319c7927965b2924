"""Images from a folder, and augmentation that is the same for whoever reads a sample."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.cli import main
from lockstep.config import CNN, Config, Data, Train
from lockstep.data import Reader, Share, build_data
from lockstep.data.images import PADDING, shifted
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.training.loop import train
from tests.ranks import on_ranks

Image = pytest.importorskip("PIL.Image")


def make_images(folder: Path, count: int = 14) -> Path:
    """Two classes: bright above, and bright below."""
    numbers = np.random.default_rng(0)
    for which in ("train", "test"):
        for name in ("above", "below"):
            (folder / which / name).mkdir(parents=True)
            for i in range(count):
                pixels = numbers.integers(0, 60, (10, 12, 3))
                half = slice(0, 5) if name == "above" else slice(5, 10)
                pixels[half] += 150
                Image.fromarray(pixels.astype(np.uint8)).save(folder / which / name / f"{i:02}.png")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images"))


def config(folder: Path | str, workers: int = 0, **settings: object) -> Config:
    data = Data("imagefolder", path=str(folder), shape=(3, 8, 8), augment=("crop", "flip"), workers=workers)
    given = {"epochs": 2, "batch_size": 10, "lr": 0.05, "log_every": 1, **settings}
    return Config(CNN(channels=(4,), hidden=8), data, Train(**given))  # type: ignore[arg-type]


def test_a_folder_is_a_data_set(folder: Path) -> None:
    dataset = build_data(config(folder))
    assert (len(dataset.train), dataset.spec.shape, dataset.spec.classes) == (28, (3, 8, 8), 2)
    batch = dataset.test.batch(torch.tensor([0, 27]))
    assert batch.targets.tolist() == [0, 1]
    assert batch.inputs[0, :, :3].mean() > batch.inputs[0, :, 5:].mean() + 0.4
    assert 0 <= batch.inputs.min() <= batch.inputs.max() <= 1


def test_a_shift_moves_an_image() -> None:
    images = torch.rand(3, 2, 6, 5)
    middle = torch.tensor([[PADDING, PADDING], [PADDING + 1, PADDING], [PADDING, PADDING - 2]])
    found = shifted(images, middle)
    assert torch.equal(found[0], images[0])
    assert torch.equal(found[1, :, :-1], images[1, :, 1:])
    assert torch.equal(found[2, :, :, 2:], images[2, :, :, :-2])
    assert found[2, :, :, :2].abs().max() == 0


def test_a_sample_is_the_same_for_whoever_reads_it(folder: Path) -> None:
    split = build_data(config(folder)).train
    whole = {epoch: [batch.inputs for _, batch in Reader(split, 10, 0, Share()).epoch(epoch)] for epoch in (0, 1)}
    assert not torch.equal(torch.cat(whole[0]).sort(0).values, torch.cat(whole[1]).sort(0).values)
    for workers in (0, 2):
        readers = [Reader(split, 10, 0, Share(r, 3), workers) for r in range(3)]
        for epoch in (0, 1):
            for start in (0, 1):
                parts = [list(reader.epoch(epoch, start)) for reader in readers]
                for step, shares in enumerate(zip(*parts, strict=True)):
                    found = torch.cat([batch.inputs for _, batch in shares])
                    assert torch.equal(found, whole[epoch][start + step])


def losses(world: World, folder: str, workers: int) -> list[float]:
    return train(world, config(folder, workers), quiet=True).losses


@pytest.mark.slow
def test_every_number_of_ranks_learns_alike(folder: Path) -> None:
    (alone,) = on_ranks(losses, 1, str(folder), 0)
    for found in on_ranks(losses, 2, str(folder), 1):
        assert found == pytest.approx(alone, abs=1e-5)


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"has no .*train"):
        build_data(config(tmp_path))
    odd = make_images(tmp_path / "odd", count=1)
    (odd / "test" / "above").rename(odd / "test" / "aside")
    with pytest.raises(UserError, match="class above is in one of"):
        build_data(config(odd))
    (odd / "test" / "aside").rename(odd / "test" / "above")
    (odd / "train" / "above" / "00.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"00\.png cannot be read as an image"):
        build_data(config(odd)).train.batch(torch.tensor([0]))
    words = f"train --model.name gpt --data.name text --data.augment flip --device cpu --run-dir {tmp_path}/r"
    assert main(words.split()) == 2
    assert "data.augment flip is for images" in capsys.readouterr().err
