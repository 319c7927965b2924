"""A rank's share of one global batch after the other, read ahead where that pays.

The order depends on the seed and the epoch only (`sampler.py`), so any number of ranks sees the same global batches,
and a position is a number of steps: a run that goes on from there, also at other ranks, reads each sample exactly once.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import Sampler as Order

from lockstep.data.batch import Batch, Share
from lockstep.data.dataset import Samples, Split, Windows
from lockstep.data.sampler import Sampler, read_share
from lockstep.data.user_data import Streamed, collated


class Reader:
    """The global batches of a training set, of which this rank reads its share."""

    def __init__(self, split: Split, batch_size: int, seed: int, share: Share, workers: int = 0) -> None:
        """`workers`: processes that read ahead, of data that is read from a disk."""
        self.split, self.batch_size, self.share, self.workers = split, batch_size, share, workers
        self.sampler = None if isinstance(split, Streamed) else Sampler(len(split), batch_size, seed)
        self._order = _InOrder()
        self._loader: DataLoader[Any] | None = None

    @property
    def steps_per_epoch(self) -> int | None:
        """None: a stream, which has no known end of an epoch."""
        return None if self.sampler is None else self.sampler.steps_per_epoch

    @property
    def samples(self) -> int | None:
        return None if self.sampler is None else self.sampler.length

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch]]:
        """(samples of the global batch, this rank's share of it), from step `start` on. A stream has one epoch."""
        if self.sampler is None:
            yield from self._stream(start)
        elif self.workers and not isinstance(getattr(self.split, "split", self.split), Samples | Windows):
            yield from self._by_workers(epoch, list(self.sampler.epoch(epoch, start)))
        else:
            for indices in self.sampler.epoch(epoch, start):
                yield len(indices), read_share(self.split, indices, self.share, epoch)

    def _by_workers(self, epoch: int, batches: list[Tensor]) -> Iterator[tuple[int, Batch]]:
        if self._loader is None:  # its workers stay for all epochs: it takes seconds to start them
            self._loader = DataLoader(
                _Shares(self.split, self.share),
                sampler=self._order,
                batch_size=None,
                num_workers=self.workers,
                pin_memory=torch.cuda.is_available(),
                persistent_workers=True,
            )
        self._order.batches = [(epoch, indices) for indices in batches]
        for indices, (inputs, targets, filler) in zip(batches, self._loader, strict=True):
            yield len(indices), Batch(inputs, targets, bool(filler))

    def _stream(self, start: int) -> Iterator[tuple[int, Batch]]:
        """Every rank reads all of it, and makes a batch of its own rows."""
        assert isinstance(self.split, Streamed)
        for step, samples in enumerate(self.split.global_batches(self.batch_size)):
            if step >= start:
                rows, filler = self.share.rows_or_filler(len(samples))
                yield len(samples), replace(collated(samples[rows], self.split.name), filler=filler)


class _Shares(Dataset[Any]):
    """For a worker: the indices of a global batch -> a rank's share of it."""

    def __init__(self, split: Split, share: Share) -> None:
        self.split, self.share = split, share

    def __getitem__(self, wanted: Any) -> tuple[Tensor, Tensor, bool]:
        epoch, indices = wanted
        batch = read_share(self.split, indices, self.share, epoch)
        return batch.inputs, batch.targets, batch.filler


class _InOrder(Order[Any]):
    """(epoch, indices) of the global batches of an epoch, as they are."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, Tensor]] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)
