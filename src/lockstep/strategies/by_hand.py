"""What the engines by hand have in common: a wrapper around the stage that reduces gradients (`GradientWrapper`)."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from lockstep.parallel.data.wrapper import GradientWrapper
from lockstep.strategies.engine import Engine


class ByHand(Engine):
    """Gradients are reduced in the last micro-batch; a subclass that reduces in each overrides `synchronize`."""

    module: GradientWrapper

    def synchronize(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.module.no_sync()

    def keep_local_gradients(self) -> AbstractContextManager[None]:
        return self.module.no_sync()

    def accumulate(self) -> AbstractContextManager[None]:
        return self.module.no_sync()

    def reduce_in_backward(
        self, complete: Collection[Tensor], pending: Collection[Tensor] | None
    ) -> AbstractContextManager[None]:
        return self.module.last_backward(complete, pending)

    def zero_gradients(self) -> None:
        self.module.zero_grad()

    def finish_gradients(self) -> None:
        self.module.finish_gradient_synchronization()
