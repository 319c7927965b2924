"""One process takes the whole global batch: the reference that all others are held against."""

from torch import nn

from lockstep.config import Parallel
from lockstep.layout import Degrees
from lockstep.parallel.law import NOTHING, Sent
from lockstep.strategies.engine import Engine
from lockstep.strategies.facts import Facts
from lockstep.strategies.model_sizes import ModelSizes


class Single(Engine):
    """In a world of several ranks, each does all the work by itself and none communicates."""

    takes_experts = True
    native_axes = ("tp", "pp")
    model_axes = ("pp", "tp")  # with cp gradients of positions have to be reduced

    @classmethod
    def facts(cls, parallel: Parallel) -> Facts:
        return Facts("one process, the whole batch: the reference", sends="0")

    @classmethod
    def degrees(cls, parallel: Parallel, ranks: int) -> Degrees:
        return Degrees()

    @classmethod
    def traffic(cls, sizes: ModelSizes, parallel: Parallel, ranks: int) -> Sent:
        return NOTHING

    def wrap(self, stage: nn.Module) -> None:
        self.model = self.module = stage
        self.optimizer = self.options.make_optimizer(self.trainable())
