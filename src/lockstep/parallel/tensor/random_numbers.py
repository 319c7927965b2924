"""Random numbers in a cut model: the same on all ranks where tensors are whole, different ones where they are cut.

Dropout on a whole tensor must drop the same elements on every rank, or ranks would diverge. Dropout inside a cut
region must not: it would drop the same elements of every rank's heads. So the ranks share one stream of random
numbers, and inside a cut region each rank uses its own stream, whose seed is drawn from the shared one.
Recomputed activations get the same numbers again: the shared stream is restored first, and the seed follows from it.
"""

import torch
from torch import Tensor, nn

from lockstep.layout.group import Group

LARGEST_SEED = 2**48


class OwnNumbers:
    """`enter` a cut region with the first tensor of it, `leave` it with the last."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._shared: tuple[torch.Generator, Tensor] | None = None
        self._seed = -1

    def enter(self, x: Tensor) -> None:
        """Switch to this rank's stream, or stay in it. (A recomputation may end inside a region, and its caller
        restores the shared stream: then the seed differs.)
        """
        generator = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
        if self._shared is not None and generator.initial_seed() == self._seed:
            return
        seed = int(torch.randint(LARGEST_SEED, ()))  # of the host's stream, which ranks have in common
        self._shared, self._seed = (generator, generator.get_state()), seed + self.group.rank
        generator.manual_seed(self._seed)

    def leave(self) -> None:
        if self._shared is not None:
            generator, state = self._shared
            generator.set_state(state)
            self._shared = None


def draws_numbers(module: nn.Module) -> bool:
    """Whether the module uses dropout: as a dropout module, or by a `dropout` attribute of a part or of its `shape`."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            return True
        for holder in (part, getattr(part, "shape", None)):
            rate = getattr(holder, "dropout", 0.0)
            if isinstance(rate, float | int) and rate > 0:
                return True
    return False
