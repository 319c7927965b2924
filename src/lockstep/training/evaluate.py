"""How good the model is on data that it has not seen, each rank computing its share."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch

from lockstep.comm.collectives import all_reduce
from lockstep.comm.hosts import any_rank
from lockstep.data import Batch, Sampler, Share, Split, Streamed, collated, read_share
from lockstep.strategies import ParallelModel

EVALUATION_BATCH = 512


def evaluate(
    strategy: ParallelModel, split: Split, batch_size: int = EVALUATION_BATCH, batches: int | None = None
) -> tuple[float, float] | None:
    """(mean loss, accuracy) over `split`, or its first `batches`; None if some rank was asked to stop meanwhile."""
    sums = torch.zeros(3, dtype=torch.float64, device=strategy.world.device)
    strategy.synchronize_buffers()
    strategy.model.eval()
    stopped = False
    with strategy.evaluation_weights():
        for batch in islice(shares(split, batch_size, strategy.batch_share()), batches):
            stopped = strategy.stop_requested
            if strategy.layout.norm.size > 1:  # all ranks leave at the same batch: forward itself may communicate
                stopped = any_rank(stopped, strategy.world.device, strategy.layout.norm)
            if stopped:
                break
            sums += strategy.evaluate(batch)
    strategy.model.train()
    if stopped:
        return None
    all_reduce(sums, group=strategy.layout.loss, purpose="evaluation")
    loss, correct, count = sums.tolist()
    return loss / max(count, 1.0), correct / max(count, 1.0)


def shares(split: Split, batch_size: int, share: Share) -> Iterator[Batch]:
    """This rank's share of one batch after the other. A stream is read by every rank, from its beginning to its end."""
    if not isinstance(split, Streamed):
        for indices in Sampler(len(split), batch_size, shuffle=False).epoch(0):
            yield read_share(split, indices, share)
        return
    for samples in split.batches(batch_size):
        rows, filler = share.rows_or_filler(len(samples))
        yield replace(collated(samples[rows], split.name), filler=filler)
