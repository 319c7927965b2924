"""Images from a folder, and augmentation that the seed, the epoch and the sample decide: a sample is
the same on every rank, and after a resume.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.data.batch import Batch
from lockstep.data.dataset import DataSet, DataSpec, Split
from lockstep.errors import UserError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm")
PADDING = 4
"""Pixels around an image, of which `crop` takes a part as large as it was."""


@dataclass
class ImageFolder:
    """A split of files, each decoded when it is wanted: FOLDER/CLASS/*.png. The classes are in the order of names."""

    files: list[Path]
    targets: list[int]
    classes: tuple[str, ...]
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Tensor) -> Batch:
        chosen = indices.tolist()
        images = torch.stack([decoded(self.files[i], self.shape) for i in chosen])
        return Batch(images, torch.tensor([self.targets[i] for i in chosen]))


def load_imagefolder(folder: Path, shape: tuple[int, ...]) -> DataSet:
    """`folder` has train/CLASS/* and test/CLASS/*, the same classes in both. Images are resized to `shape`."""
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(f"data.shape is {shape}, but images are (1 or 3, height, width)")
    train, test = (listed(folder / which, shape) for which in ("train", "test"))
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise UserError(f"{folder}: class {odd[0]} is in one of train/ and test/ only")
    return DataSet(f"imagefolder {folder}", DataSpec("images", shape, len(train.classes)), train, test)


def listed(folder: Path, shape: tuple[int, ...]) -> ImageFolder:
    if not folder.is_dir():
        raise UserError(f"data.path needs {folder.parent}/train/CLASS/*.png and test/CLASS/*.png, and has no {folder}")
    classes = tuple(sorted(f.name for f in folder.iterdir() if f.is_dir()))
    found = [
        (file, number)
        for number, name in enumerate(classes)
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in ENDINGS
    ]
    if not found:
        raise UserError(f"{folder} has no images in it ({', '.join(ENDINGS)})")
    return ImageFolder([file for file, _ in found], [number for _, number in found], classes, shape)


def decoded(file: Path, shape: tuple[int, ...]) -> Tensor:
    """(channels, height, width), from 0 to 1."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UserError("data.name imagefolder needs the Pillow package: pip install pillow") from None
    channels, height, width = shape
    try:
        with Image.open(file) as image:
            pixels = image.convert("L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BILINEAR)
    except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{file} cannot be read as an image ({' '.join(str(error).split())[:150]})") from None
    array = np.asarray(pixels, dtype=np.uint8).reshape(height, width, channels)
    return torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255


@dataclass
class Augmented:
    """A training set of images, each shifted or mirrored in its own way in every epoch."""

    split: Any
    kinds: tuple[str, ...]
    seed: int

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        batch: Batch = self.split.batch(indices)
        choices = np.stack([self._choices(epoch, i) for i in indices.tolist()])
        images = batch.inputs
        if "crop" in self.kinds:
            shifts = torch.from_numpy(choices[:, :2] % (2 * PADDING + 1)).to(images.device)
            images = shifted(images, shifts)
        if "flip" in self.kinds:
            mirrored = torch.from_numpy(choices[:, 2] % 2 == 1).to(images.device)
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        return Batch(images, batch.targets)

    def _choices(self, epoch: int, sample: int) -> Any:
        return np.random.SeedSequence([self.seed, epoch, sample]).generate_state(3).astype(np.int64)


def shifted(images: Tensor, shifts: Tensor) -> Tensor:
    """Each image moved by its own (down, right), black coming in; what was in the middle of the padding is 0."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (PADDING,) * 4)
    rows = shifts[:, :1] + torch.arange(height, device=images.device)
    columns = shifts[:, 1:] + torch.arange(width, device=images.device)
    samples = torch.arange(len(images), device=images.device)
    return padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def augmented(dataset: DataSet, kinds: tuple[str, ...], seed: int) -> DataSet:
    if not kinds:
        return dataset
    if dataset.spec.kind != "images":
        raise UserError(f"data.augment {' '.join(kinds)} is for images, and {dataset.name} has {dataset.spec.kind}")
    train: Split = Augmented(dataset.train, kinds, seed)
    return DataSet(dataset.name, dataset.spec, train, dataset.test)
