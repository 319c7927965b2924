"""Steps with NVTX ranges, for Nsight Systems: the regions of our own traces, and torch's operations inside them."""

import torch

from lockstep.config import Config, check_ranges
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.profile.marked import MarkedSteps
from lockstep.profile.regions import named_blocks


def mark_steps(world: World, config: Config, steps: int, warmup: int) -> int:
    """Take `steps` marked steps after `warmup` others; the parameters of the model.

    The CUDA profiler is started for the marked ones alone, so that `nsys profile --capture-range=cudaProfilerApi`
    records nothing else. torch.profiler stays out of it: only one of the two can have the GPU's counters.
    """
    check_ranges(config)
    if world.device.type != "cuda":
        raise UserError("--nvtx marks what a GPU does for Nsight Systems, and these ranks run on the CPU; leave it out")
    marked = MarkedSteps(world, config)
    with named_blocks(marked.strategy.model) as regions:
        marked.warm_up(warmup)
        torch.cuda.cudart().cudaProfilerStart()
        with torch.autograd.profiler.emit_nvtx():
            for index in range(steps):
                marked.take(marked.read(index), regions)
        torch.cuda.cudart().cudaProfilerStop()
    return marked.strategy.parameters
