"""The real UCI handwritten digits: 1,797 images of 8x8 pixels, bundled with the package (see DIGITS.md)."""

from importlib import resources

import numpy as np
import torch

from lockstep.data.dataset import DataSet, DataSpec, Samples

TEST_EVERY = 5
"""Every fifth image is held out for testing: 1,437 train, 360 test."""


def load_digits() -> DataSet:
    with resources.files("lockstep.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"].astype(np.float32)) / 16  # 0..16 -> 0..1
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    images = images[:, None]  # (1797, 1, 8, 8)
    test = torch.arange(len(labels)) % TEST_EVERY == 0
    return DataSet(
        name="digits",
        spec=DataSpec("images", (1, 8, 8), 10),
        train=Samples(images[~test], labels[~test]),
        test=Samples(images[test], labels[test]),
    )
