"""Which samples make up which global batch: a shuffle by (seed, epoch) that every rank computes alike.

The order of the samples depends on the seed and the epoch only, never on the number of ranks, so any world size
sees the same global batches. Each rank then reads its own share of each. Over an epoch every sample is read
exactly once, the uneven tail included.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.data.batch import Batch, Share
from lockstep.data.dataset import Split
from lockstep.data.images import Augmented


@dataclass
class Sampler:
    """Global batches of indices. `(epoch, step)` is the whole state: data can go on from any position."""

    length: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.length // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """All samples, in the order of this epoch."""
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.length, generator=generator)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """The global batches of one epoch, from step `start` on."""
        order = self.order(epoch)
        for step in range(start, self.steps_per_epoch):
            yield order[step * self.batch_size : (step + 1) * self.batch_size]


def read_share(split: Split, indices: Tensor, share: Share, epoch: int = 0) -> Batch:
    """One rank's samples of the global batch `indices`; a filler if the share is empty. `epoch`: what augmentation
    depends on.
    """
    rows, filler = share.rows_or_filler(len(indices))
    mine = indices[rows]
    batch = split.batch(mine, epoch) if isinstance(split, Augmented) else split.batch(mine)
    return replace(batch, filler=filler)
