"""Steps of several strategies, measured in turns: a GPU's clock and its neighbours change while one waits."""

from statistics import median

import torch

from lockstep.data import Batch
from lockstep.strategies import ParallelModel

Runner = tuple[ParallelModel, Batch]


def in_turns(runners: dict[str, Runner], turns: int, steps: int) -> dict[str, float]:
    """The median of the seconds of a step, of turns of some steps without a pause."""
    found: dict[str, list[float]] = {name: [] for name in runners}
    for strategy, batch in runners.values():
        for _ in range(3):
            strategy.step(batch)
    for _ in range(turns):
        for name, (strategy, batch) in runners.items():
            strategy.step(batch)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(steps):
                strategy.step(batch)
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) / 1000 / steps)
    return {name: median(seconds) for name, seconds in found.items()}
