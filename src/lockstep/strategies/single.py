"""One process takes the whole global batch: the reference that all others are held against."""

from torch import nn

from lockstep.data import Share
from lockstep.strategies.base import MakeOptimizer, Strategy
from lockstep.world import ParallelDims


class Single(Strategy):
    """In a world of several ranks, each does all the work by itself and none communicates."""

    def prepare(self, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.dims = ParallelDims(dp_replicate=1)
        self.model = self.module = self.place(model)
        self.optimizer = make_optimizer(self.trainable())

    def batch_share(self) -> Share:
        return Share()
