"""What averages a bucket: the contract of all compressions."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from lockstep.parallel.data.bucket import Bucket


class Reducer(ABC):
    """Averages one bucket over the ranks; holds that bucket's state between steps."""

    @abstractmethod
    def start(self, bucket: Bucket) -> Callable[[], None]:
        """Begin; the returned function waits and writes the result into the bucket."""

    def forget_step(self) -> None:
        """The last step's gradients were not applied: restore the state from before it."""

    def state(self) -> dict[str, Tensor]:
        """What must survive a checkpoint."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The opposite of `state`."""
