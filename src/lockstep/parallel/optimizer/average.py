"""The average of the weights over the steps, which evaluation and export use instead of the last weights.

    average <- decay average + (1 - decay) weights        after every step, from the first step's weights on

It is kept for what this rank's optimizer steps, element by element: as sharded as the optimizer's state, saved with it,
and moved between layouts like it. For an evaluation the average takes the place of the weights, and afterwards these
are put back, bit by bit.

An optimizer that has an average of its own (`ScheduleFreeAdamW`) gives it by `evaluation_weight`, to the same effect.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.zero.sharded_optimizer import ShardedOptimizer

AVERAGE = "average"
"""Its name in a checkpoint, among the optimizer's state."""


class WeightAverage:
    """An exponential moving average of the weights that an optimizer steps.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        average = lockstep.WeightAverage(optimizer, decay=0.999)
        with average.applied():
            outputs = model(inputs)  # of the average; outside, of the weights as they are

    As torch.optim.swa_utils.AveragedModel with `get_ema_multi_avg_fn`, where ranks hold any part of the weights.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"decay is {decay}, but it must be at least 0 and less than 1")
        self.optimizer, self.decay = optimizer, decay
        local: Any = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
        self.local: torch.optim.Optimizer = local
        if average_of(self.local) is not None or hasattr(self.local, "evaluation_weight"):
            raise UserError(f"{type(self.local).__name__} averages its weights already; leave one of both out")
        self.tensors: dict[nn.Parameter, Tensor] = {}
        self.paused = False
        """A step only makes the tensors that there are not yet."""
        local.weight_average = self
        self.local.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        toward = 1.0 - self.decay
        skipped: Tensor | None = getattr(self.local, "found_inf", None)  # a fused optimizer has left the weights alone
        for group in self.local.param_groups:
            for parameter in group["params"]:
                if parameter not in self.tensors:
                    self.tensors[parameter] = parameter.detach().clone()
                elif self.paused:
                    continue
                elif skipped is None:
                    self.tensors[parameter].lerp_(parameter.detach(), toward)
                else:
                    difference = parameter.detach() - self.tensors[parameter]
                    self.tensors[parameter].add_(difference * (toward * (1.0 - skipped)).to(difference.dtype))

    @contextmanager
    def applied(self, model: nn.Module | None = None) -> Iterator[None]:
        """Inside, the model has the average for weights. Every rank must enter together, between two steps. `model`:
        one that PyTorch's FSDP2 shards, which keeps what it has gathered.
        """

        def written() -> None:
            if isinstance(self.optimizer, ShardedOptimizer):
                self.optimizer.gather()
                self.optimizer.wait_for_parameters()
            if model is not None:
                from torch.distributed.fsdp import FSDPModule  # slow to import

                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.wait_for_parameters()
        with evaluation_weights(self.local, written):
            yield


def average_of(optimizer: torch.optim.Optimizer) -> WeightAverage | None:
    """That an optimizer keeps, if any."""
    found: WeightAverage | None = getattr(optimizer, "weight_average", None)
    return found


def averages(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has other weights for evaluation than for training."""
    return average_of(optimizer) is not None or hasattr(optimizer, "evaluation_weight")


@contextmanager
def evaluation_weights(optimizer: Any, written: Callable[[], None]) -> Iterator[None]:
    """Inside, what this rank steps has its average for a value. `written`: called after each change of the weights."""
    kept: list[tuple[nn.Parameter, Tensor]] = []
    average = average_of(optimizer)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found = optimizer.evaluation_weight(parameter) if average is None else average.tensors.get(parameter)
                if found is not None:
                    kept.append((parameter, parameter.detach().clone()))
                    parameter.copy_(found)
    written()
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
        written()
