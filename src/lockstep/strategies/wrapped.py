"""What strategies have in common that are wrappers of our own (`parallel/`)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lockstep.parallel.wrapper import GradientWrapper
from lockstep.strategies.base import Strategy


class Wrapped(Strategy):
    """The wrapper brings gradients together."""

    module: GradientWrapper
    gradients_stay_whole = True
    """While micro-batches accumulate, so that they meet once per step; else each micro-batch's are reduced at once."""

    def zero_gradients(self) -> None:
        self.module.zero_grad()

    def gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        if last:
            return nullcontext()
        return self.module.no_sync() if self.gradients_stay_whole else self._reduced_at_once()

    @contextmanager
    def _reduced_at_once(self) -> Iterator[None]:
        yield
        self.module.finish_gradient_synchronization()

    def no_gradient_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync()

    def finish_gradients(self) -> None:
        self.module.finish_gradient_synchronization()
