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
from lockstep.parallel.optimizer.step import parameters_of
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
        self.only_begins = False
        """A step only makes the tensors that there are not yet."""
        self.interrupted = False
        """An exception has ended `applied` where other ranks hold parts of the weights."""
        local.weight_average = self
        self.local.register_step_post_hook(self._after_step)
        self.local.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        toward = 1.0 - self.decay
        skipped: Tensor | None = getattr(self.local, "found_inf", None)  # a fused optimizer has left the weights alone
        for parameter in parameters_of(self.local):
            if not parameter.requires_grad:
                continue
            weights = parameter.detach()
            if weights.dtype in (torch.bfloat16, torch.float16):
                weights = weights.float()  # too narrow for small differences to add up
            if parameter not in self.tensors:
                self.tensors[parameter] = weights.clone()
            elif self.only_begins:
                continue
            elif skipped is None:
                self.tensors[parameter].lerp_(weights, toward)
            else:
                difference = weights - self.tensors[parameter]
                self.tensors[parameter].add_(difference * (toward * (1.0 - skipped)).to(difference.dtype))

    def _before_step(self, *_: Any) -> None:
        if self.interrupted:
            raise RuntimeError(
                "an exception has ended an evaluation of averaged weights, and other ranks' parts of the weights are "
                "averages still; load a checkpoint, or end the run"
            )

    def state_dict(self) -> dict[str, Any]:
        """What this rank has of the average, in the order of the optimizer's parameters."""
        return {"decay": self.decay, "average": [self.tensors.get(p) for p in parameters_of(self.local)]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = list(parameters_of(self.local))
        if len(parameters) != len(state_dict["average"]):
            raise UserError(
                f"the average is of {len(state_dict['average'])} parameters, and the optimizer has {len(parameters)}"
            )
        self.decay = state_dict["decay"]
        found = zip(parameters, state_dict["average"], strict=True)
        self.tensors = {p: t.detach().to(p.device, copy=True) for p, t in found if t is not None}

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
        try:
            with evaluation_weights(self.local, written):
                yield
        except BaseException:
            self.interrupted = isinstance(self.optimizer, ShardedOptimizer)
            raise


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

    @torch.no_grad()
    def put_back() -> None:
        for parameter, value in kept:
            parameter.copy_(value)

    try:
        with torch.no_grad():
            for parameter in parameters_of(optimizer):
                found = optimizer.evaluation_weight(parameter) if average is None else average.tensors.get(parameter)
                if found is not None:
                    kept.append((parameter, parameter.detach().clone()))
                    parameter.copy_(found)
        written()
        yield
    except BaseException:
        put_back()  # and nothing is sent: other ranks may not be here
        raise
    put_back()
    written()


@contextmanager
def only_beginning(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around a step that is there to make state, and moves nothing: an average that exists stays as it is."""
    average = average_of(optimizer)
    if average is not None:
        average.only_begins = True
    try:
        yield
    finally:
        if average is not None:
            average.only_begins = False
