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

    def enter(self, x: Tensor) -> None:
        seed = int(torch.randint(LARGEST_SEED, ()))  # of the host's stream, which ranks have in common
        generator = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
        self._shared = generator, generator.get_state()
        generator.manual_seed(seed + self.group.rank)

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
