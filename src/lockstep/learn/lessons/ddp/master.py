"""7. Your own DDP: tied, unused, frozen parameters, and no_sync."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class DistributedModel(nn.Module):
    """After backward and `finish()`, every gradient is the mean over all ranks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.size = dist.get_world_size()
        #: solution
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, src=0)
        trainable = [p for p in module.parameters() if p.requires_grad]
        #: todo all ranks alike; then the parameters that have gradients, each once
        # trainable: list[nn.Parameter] = []
        #: wrong frozen-not-sent
        # trainable = [p for p in module.parameters() if p.requires_grad]
        # for tensor in trainable:
        #     dist.broadcast(tensor.data, src=0)
        #: wrong tied-twice
        # for tensor in [*module.parameters(), *module.buffers()]:
        #     dist.broadcast(tensor.data, src=0)
        # trainable = [p for m in module.modules() for p in m.parameters(recurse=False) if p.requires_grad]
        #: end
        self.order = trainable[::-1]
        self.next = 0
        """Of `order`: what comes before has been started."""
        self.ready: set[Tensor] = set()
        self.pending: list[tuple[Tensor, Any]] = []
        self.synchronizes = True
        for parameter in dict.fromkeys(trainable):
            parameter.register_post_accumulate_grad_hook(self.hook)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only add up on this rank."""
        #: solution
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True
        #: todo hooks do nothing inside, also when there is an error
        # yield
        #: wrong syncs-always
        # yield
        #: end

    def hook(self, parameter: Tensor) -> None:
        if self.synchronizes:
            self.ready.add(parameter)
            self.launch()

    def launch(self) -> None:
        """Start what is next in the order, as long as it is ready."""
        #: solution
        while self.next < len(self.order) and self.order[self.next] in self.ready:
            parameter = self.order[self.next]
            self.pending.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
            self.next += 1
        #: todo the same order on all ranks, whatever they use
        #: wrong hooks-order
        # for parameter in self.ready - {p for p, _ in self.pending}:
        #     self.pending.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
        #: end

    def finish(self) -> None:
        """Backward has ended: what is not ready was not used here."""
        #: solution
        for parameter in self.order:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.ready.add(parameter)
        self.launch()
        for reduced, work in self.pending:
            work.wait()
            assert reduced.grad is not None
            reduced.grad /= self.size
        self.next, self.ready, self.pending = 0, set(), []
        #: todo zeros for what was not used; start the rest; wait, divide, set back
        #: end
