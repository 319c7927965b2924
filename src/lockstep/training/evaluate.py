"""How good the model is on data that it has not seen, each rank computing its share."""

import torch

from lockstep.comm.collectives import all_reduce
from lockstep.data import Sampler, Split, read_share
from lockstep.strategies import Strategy

EVALUATION_BATCH = 512


def evaluate(strategy: Strategy, split: Split) -> tuple[float, float]:
    """(mean loss, accuracy) over `split`."""
    share = strategy.batch_share()
    sums = torch.zeros(3, dtype=torch.float64, device=strategy.world.device)
    strategy.synchronize_buffers()
    strategy.model.eval()
    for indices in Sampler(len(split), EVALUATION_BATCH, shuffle=False).epoch(0):
        sums += strategy.evaluate(read_share(split, indices, share))
    strategy.model.train()
    if share.count > 1:
        all_reduce(sums, purpose="evaluation")
    loss, correct, count = sums.tolist()
    return loss / max(count, 1.0), correct / max(count, 1.0)
