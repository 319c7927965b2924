"""The steps that are profiled: those of a config, with names that stand in every trace."""

import torch
from torch.profiler import record_function

from lockstep.config import Config
from lockstep.data import Batch, read_share
from lockstep.layout.world import World
from lockstep.measure.steps import full_batches, synchronize
from lockstep.profile.diagnosis import DATA, STEP
from lockstep.profile.regions import Regions
from lockstep.training.prepare import load_head, prepare_strategy


class MarkedSteps:
    """The strategy of a config, on the data of that config, a step at a time."""

    def __init__(self, world: World, config: Config) -> None:
        self.world = world
        self.dataset = load_head(world, config)
        self.strategy = prepare_strategy(world, config, self.dataset)
        self.batches = full_batches(config, self.dataset)

    def warm_up(self, steps: int) -> None:
        """Without marks; all ranks end it together."""
        for index in range(steps):
            self.strategy.step(self._read(index))
        self._settle()
        synchronize(self.world)

    def read(self, index: int) -> Batch:
        with record_function(DATA):
            return self._read(index)

    def take(self, batch: Batch, regions: Regions) -> None:
        with record_function(STEP):
            self.strategy.step(batch)
            regions.end_backward()
            self._settle()

    def _read(self, index: int) -> Batch:
        return read_share(self.dataset.train, self.batches[index % len(self.batches)], self.strategy.batch_share())

    def _settle(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
