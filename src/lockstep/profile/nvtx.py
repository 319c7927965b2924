"""Steps with NVTX ranges, for Nsight Systems: the regions of our own traces, and torch's operations inside them."""

import torch
from torch.profiler import record_function

from lockstep.config import Config, check_ranges
from lockstep.data import read_share
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.measure.steps import full_batches, meet
from lockstep.profile.diagnosis import DATA, STEP
from lockstep.profile.regions import named_blocks
from lockstep.training.prepare import load_head, prepare_strategy


def mark_steps(world: World, config: Config, steps: int, warmup: int) -> int:
    """Take `steps` marked steps after `warmup` others; the parameters of the model.

    The CUDA profiler is started for the marked ones alone, so that `nsys profile --capture-range=cudaProfilerApi`
    records nothing else. torch.profiler stays out of it: only one of the two can have the GPU's counters.
    """
    check_ranges(config)
    if world.device.type != "cuda":
        raise UserError("--nvtx marks what a GPU does for Nsight Systems, and these ranks run on the CPU; leave it out")
    dataset = load_head(world, config)
    strategy = prepare_strategy(world, config, dataset)
    batches = full_batches(config, dataset)
    with named_blocks(strategy.model) as regions:
        for index in range(warmup):
            strategy.step(read_share(dataset.train, batches[index % len(batches)], strategy.batch_share()))
        torch.cuda.synchronize()
        meet(world)
        torch.cuda.cudart().cudaProfilerStart()
        with torch.autograd.profiler.emit_nvtx():
            for index in range(steps):
                with record_function(DATA):
                    batch = read_share(dataset.train, batches[index % len(batches)], strategy.batch_share())
                with record_function(STEP):
                    strategy.step(batch)
                    regions.end_backward()
                    torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
    return strategy.parameters
