"""A small CNN on a folder of images, FOLDER/train/CLASS/*.png and FOLDER/test/CLASS/*.png, shifted and mirrored.

python examples/image_classifier.py --folder images --nproc 2
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.data import Reader, Share
from lockstep.data.images import augmented, load_imagefolder


def network(classes: int) -> nn.Module:
    def layer(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(layer(3, 16), layer(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


def train(folder: str, epochs: int, batch_size: int, workers: int) -> float:
    """Returns the share of the test images that it gets right."""
    world = lockstep.init()
    dataset = augmented(load_imagefolder(Path(folder), (3, 32, 32)), ("crop", "flip"), seed=0)
    reader = Reader(dataset.train, batch_size, seed=0, share=Share(world.rank, world.size), workers=workers)
    model = lockstep.DataParallel(network(dataset.spec.classes).to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for samples, batch in reader.epoch(epoch):
            mine = batch.to(world.device)
            loss = F.cross_entropy(model(mine.inputs), mine.targets, reduction="sum") * (not mine.filler)
            # The mean over the ranks of sum x ranks / samples is the mean over the samples, also of an uneven batch.
            (loss * world.size / samples).backward()
            optimizer.step()
            optimizer.zero_grad()
        if world.is_main:
            print(f"epoch {epoch + 1:3}  loss of rank 0's last samples {loss.item() / len(mine):.4f}", flush=True)
    model.eval()
    test = dataset.test.batch(torch.arange(len(dataset.test))).to(world.device)
    with torch.no_grad():
        return float((model.module(test.inputs).argmax(-1) == test.targets).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True)
    for name, default in (("nproc", 2), ("epochs", 5), ("batch-size", 32), ("workers", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    settings = (given.folder, given.epochs, given.batch_size, given.workers)
    print(f"right: {lockstep.spawn(train, *settings, nproc=given.nproc)[0]:.1%} of the test images")


if __name__ == "__main__":
    main()
