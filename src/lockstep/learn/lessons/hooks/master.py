"""6. Gradient hooks: average while backward still runs."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


class Overlapped:
    """After `finish()`, every gradient is the mean over all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.size = dist.get_world_size()
        self.pending: list[tuple[Tensor, Any]] = []
        """Parameters whose gradients are in flight, and the handle of each."""
        for parameter in model.parameters():
            #: solution
            parameter.register_post_accumulate_grad_hook(self.ready)
            #: todo call self.ready when this parameter's gradient is complete
            #: wrong after-backward
            # assert parameter is not None
            #: end

    def ready(self, parameter: Tensor) -> None:
        """The gradient of this parameter is complete; backward still runs."""
        #: solution
        self.pending.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
        #: todo start its all-reduce, and do not wait
        #: wrong waits-in-hook
        # work = dist.all_reduce(parameter.grad, async_op=True)
        # work.wait()
        # self.pending.append((parameter, work))
        #: end

    def finish(self) -> None:
        """Backward has ended: wait for what is in flight, and make sums means."""
        #: solution
        for parameter, work in self.pending:
            work.wait()
            assert parameter.grad is not None
            parameter.grad /= self.size
        self.pending.clear()
        #: todo wait, divide, and be ready for the next step
        #: wrong after-backward
        # for parameter in self.model.parameters():
        #     dist.all_reduce(parameter.grad)
        #     parameter.grad /= self.size
        #: wrong never-waits
        # for parameter, _ in self.pending:
        #     parameter.grad /= self.size
        # self.pending.clear()
        #: wrong sum
        # for _, work in self.pending:
        #     work.wait()
        # self.pending.clear()
        #: end
