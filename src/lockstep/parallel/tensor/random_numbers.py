"""Random numbers in a cut model: the same on all ranks where tensors are whole, others where they are cut.

A dropout of something whole must drop the same elements on every rank, or ranks would part. A dropout inside a cut
region must not: the heads of one rank would be dropped as those of the other. So the ranks share one stream of random
numbers, and while they are in a cut region each has a stream of its own, whose seed is drawn from the shared one.
Recomputed activations find the same numbers again: the shared stream is put back before, and the seed follows from it.
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
        """Or stay in it. (A recomputation may end in the midst of a region, and its caller puts the stream
        back: then it is another one's seed.)
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
    """Whether something in it drops: a dropout module, or an attribute of that name, its own or its sizes'."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            return True
        for holder in (part, getattr(part, "shape", None)):
            rate = getattr(holder, "dropout", 0.0)
            if isinstance(rate, float | int) and rate > 0:
                return True
    return False
