"""CIFAR-10 in its original python batches."""

import pickle
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.data.dataset import DataSet, DataSpec, Samples
from lockstep.data.download import RemoteFile, fetch
from lockstep.errors import UserError

ARCHIVE = RemoteFile(
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)
FOLDER = "cifar-10-batches-py"
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
TEST = ["test_batch"]


def load_cifar10(path: Path, download: bool = True) -> DataSet:
    """From `path/cifar-10-batches-py`; files that are there are used as they are."""
    folder = path / FOLDER
    missing = [name for name in TRAIN + TEST if not (folder / name).exists()]
    if missing:
        archive = path / "cifar-10-python.tar.gz"
        if not archive.exists():
            if not download:
                raise UserError(
                    f"{folder} lacks {', '.join(missing)} and data.download is false; "
                    f"put {archive.name} into {path} or the batches into {folder}"
                )
            fetch(ARCHIVE, archive)
        _unpack(archive, path)
    return DataSet("cifar10", DataSpec("images", (3, 32, 32), 10), _read(folder, TRAIN), _read(folder, TEST))


def _unpack(archive: Path, into: Path) -> None:
    """Unpack beside the target and move file by file: no half-written batch ever has its final name."""
    try:
        with tempfile.TemporaryDirectory(dir=into) as scratch, tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
            (into / FOLDER).mkdir(exist_ok=True)
            for file in (Path(scratch) / FOLDER).iterdir():
                file.replace(into / FOLDER / file.name)
    except (tarfile.TarError, EOFError, OSError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{archive} is corrupt or truncated ({why}); delete it to fetch it again") from None


def _read(folder: Path, names: list[str]) -> Samples:
    images, labels = [], []
    for name in names:
        record = _read_batch(folder / name)
        images.append(record[b"data"].reshape(-1, 3, 32, 32))
        labels.extend(record[b"labels"])
    return Samples(torch.from_numpy(np.concatenate(images)), torch.tensor(labels))


def _read_batch(file: Path) -> dict[bytes, Any]:
    try:
        with file.open("rb") as source:
            record = _ArraysOnly(source, encoding="bytes").load()
        data, labels = np.asarray(record[b"data"]), record[b"labels"]
        if data.dtype != np.uint8 or data.shape != (len(labels), 3072):
            raise ValueError(f"data of shape {data.shape} for {len(labels)} labels")
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{file} is corrupt or truncated ({error}); delete it to unpack it again") from None
    return {b"data": data, b"labels": labels}


class _ArraysOnly(pickle.Unpickler):
    """A pickle can name any function to call; these files need only NumPy arrays."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer", "encode"})

    def find_class(self, module: str, name: str) -> Any:
        if name in self.ALLOWED and module.split(".")[0] in ("numpy", "_codecs"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a CIFAR-10 batch")
