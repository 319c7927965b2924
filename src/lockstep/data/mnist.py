"""MNIST in its original IDX files, plain or gzipped."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch

from lockstep.data.dataset import DataSet, DataSpec, Samples
from lockstep.data.download import RemoteFile, fetch
from lockstep.errors import UserError

HOME = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FILES = {  # name -> sha256 of the gzipped file
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


def load_mnist(path: Path, download: bool = True) -> DataSet:
    """From `path/MNIST/raw` (torchvision's layout); files that are there are used as they are."""
    folder = path / "MNIST" / "raw"
    arrays = {name: read_idx(_find(folder, name, download)) for name in FILES}
    splits = {}
    for split in ("train", "t10k"):
        images, labels = arrays[f"{split}-images-idx3-ubyte"], arrays[f"{split}-labels-idx1-ubyte"]
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise UserError(
                f"{folder}: the {split} images have shape {images.shape} and the labels {labels.shape}; "
                f"they must be (n, height, width) and (n,): delete both and fetch them again"
            )
        splits[split] = Samples(torch.from_numpy(images)[:, None], torch.from_numpy(labels).long())
    shape = tuple(splits["train"].inputs.shape[1:])
    return DataSet("mnist", DataSpec("images", shape, 10), splits["train"], splits["t10k"])


def _find(folder: Path, name: str, download: bool) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.exists():
            return file
    packed = folder / f"{name}.gz"
    if not download:
        raise UserError(f"{packed} is missing and data.download is false; put the four MNIST files into {folder}")
    fetch(RemoteFile(f"{HOME}{name}.gz", FILES[name]), packed)
    return packed


def read_idx(file: Path) -> np.ndarray:
    """IDX: two zero bytes, a type (8 = uint8), the number of dimensions, their big-endian sizes, the bytes."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file} is corrupt or truncated ({error}); delete it to fetch it again") from None
    dimensions = raw[3] if len(raw) >= 4 and raw[:3] == b"\x00\x00\x08" else 0
    header = 4 + 4 * dimensions
    if dimensions == 0 or len(raw) < header:
        raise UserError(f"{file} is not an IDX file of bytes; delete it to fetch it again")
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    size = int(np.prod(shape))
    if len(raw) != header + size:
        raise UserError(f"{file} holds {len(raw) - header} bytes of data, but its header says {size}; delete it")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape).copy()
