"""Experts beside tensor parallelism, in one of two ways.

whole   each expert is on one rank. The tp ranks, which have the same tokens, take a part of them each, as they have
        anyway with sequence parallelism, and are ranks of ep like any others. The router sees only a part of the
        tokens on each of them, so its gradient is summed
cut     each expert is cut along d_ff, as a dense MLP: gate and up by rows, down by columns. Each tp rank computes
        all tokens, and their results are summands. Rows travel among ranks that have the same part of experts
"""

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from lockstep.errors import UserError
from lockstep.layout.group import Group
from lockstep.models.experts import MixtureOfExperts
from lockstep.parallel.tensor.exchange import (
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    split_to_ranks,
)
from lockstep.parallel.tensor.parallel_products import SEQUENCE
from lockstep.parallel.tensor.tensor_parallel import SummedOverPositions

Routed = Callable[[Tensor, Callable[[], None]], Tensor]


def share_tokens(mixture: MixtureOfExperts, group: Group, sequence: bool) -> None:
    """Each rank routes its part of the tokens, and gets all results. With `sequence` it has only its part anyway."""
    if sequence:
        return  # the router's gradient is summed with those of all that lies between matrices
    mixture.router.forward = SummedOverPositions(mixture.router, group)  # type: ignore[method-assign]
    mixture.routed = PartOfTokens(mixture.routed, group)  # type: ignore[method-assign]


class PartOfTokens:
    """A mixture's `routed` on this rank's part of the tokens."""

    def __init__(self, routed: Routed, group: Group) -> None:
        self.routed, self.group = routed, group

    def __call__(self, x: Tensor, meanwhile: Callable[[], None]) -> Tensor:
        tokens, n = x.reshape(-1, x.shape[-1]), self.group.size
        bounds = [len(tokens) * rank // n for rank in range(n + 1)]
        sizes = [stop - start for start, stop in pairwise(bounds)]
        part = self.routed(split_to_ranks(tokens, self.group, 0, sizes), meanwhile)
        return gather_from_ranks(part, self.group, 0, sizes).view(x.shape)


def cut_along_width(mixture: MixtureOfExperts, group: Group, sequence: bool) -> None:
    """All ranks route all tokens alike. What the parts of experts are is for `spread_experts` to say."""
    mixture.enter = Entering(group)
    mixture.leave = Leaving(group)
    if sequence:
        mixture.routed = AllPositions(mixture.routed, group)  # type: ignore[method-assign]


class Entering:
    """What every rank uses for its part of the experts: gradients add up."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return copy_to_ranks(x, self.group)


class Leaving(Entering):
    """The results of parts of experts add up."""

    def __call__(self, x: Tensor) -> Tensor:
        return reduce_from_ranks(x, self.group)


class AllPositions:
    """A mixture's `routed` where x is cut along its positions: on all of them, and this rank's are kept."""

    def __init__(self, routed: Routed, group: Group) -> None:
        self.routed, self.group = routed, group

    def __call__(self, x: Tensor, meanwhile: Callable[[], None]) -> Tensor:
        y = self.routed(gather_from_ranks(x, self.group, SEQUENCE), meanwhile)
        return split_to_ranks(y, self.group, SEQUENCE)


def width_of(mixture: MixtureOfExperts, group: Group) -> tuple[int, int]:
    """This rank's part of d_ff."""
    width = mixture.experts.gate.shape[1]
    if width % group.size:
        raise UserError(f"experts of width {width} cannot be cut into {group.size} equal parts")
    part = width // group.size
    return group.rank * part, (group.rank + 1) * part
