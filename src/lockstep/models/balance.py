"""What experts are used for: counts added up over ranks, and biases that move after each step of the optimizer."""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.models.recompute import backward_is_running

if TYPE_CHECKING:
    from lockstep.models.experts import MixtureOfExperts


class Tallied:
    """How many tokens take each expert in one forward pass."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    @property
    def load(self) -> Tensor:
        """On all ranks whose tokens are balanced together."""
        return self.counts

    @property
    def earlier(self) -> Tensor:
        """On the ranks before this one."""
        return torch.zeros_like(self.counts)


class Tally:
    """Adds up how many tokens take each expert: here, in one process."""

    def __init__(self) -> None:
        self.load_of_step: Tensor | None = None
        """Over all micro-batches of the step, where it is known beforehand."""
        self.since_step: Tensor | None = None
        """This rank's load in all training passes since the optimizer's last step."""
        self.averaged_over = 1
        """The caller takes the mean of losses over so many ranks, whose parts of the auxiliary loss add up."""
        self.skipped: Tensor | None = None
        """1 on the device where the optimizer does not take the step that it is asked for."""

    def begin(self, counts: Tensor, needs_load: bool, needs_earlier: bool) -> Tallied:
        """`needs_load`, `needs_earlier`: else ranks need not communicate for it."""
        return Tallied(counts)

    def total(self, counts: Tensor) -> Tensor:
        """Over all ranks."""
        return counts

    def passed(self, counts: Tensor, dropped: Tensor) -> None:
        """So many choices of each expert in a training pass, of which so many were dropped."""


_biased: list["weakref.ref[MixtureOfExperts]"] = []
"""In the order of their first pass, which is the same on all ranks."""


def accumulate_load(mixture: "MixtureOfExperts", counts: Tensor) -> None:
    """A training pass has sent so many tokens to each expert. What is recomputed has been counted."""
    if mixture.balance != "bias" or backward_is_running():
        return
    tally = mixture.tally
    if not any(ref() is mixture for ref in _biased):
        if not _biased:
            register_optimizer_step_post_hook(_after_step)
        _biased[:] = [ref for ref in _biased if ref() is not None] + [weakref.ref(mixture)]
    tally.since_step = counts.clone() if tally.since_step is None else tally.since_step + counts


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Of any optimizer that steps a mixture's parameters."""
    waiting = [m for ref in _biased if (m := ref()) is not None and m.tally.since_step is not None]
    if not waiting:
        return
    skipped = getattr(optimizer, "found_inf", None)  # of a fused optimizer under a gradient scaler
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for mixture in waiting:
        if any(id(p) in stepped for p in mixture.parameters()):
            move_bias(mixture, skipped)


@torch.no_grad()
def move_bias(mixture: "MixtureOfExperts", skipped: Tensor | None = None) -> None:
    """Towards an equal load; not at all where the optimizer has skipped its step, on the device."""
    tally, bias = mixture.tally, mixture.router.bias
    load, tally.since_step = tally.since_step, None
    if load is None or bias is None:
        return
    load = tally.total(load).double()
    move = mixture.balance_coefficient * torch.sign(load.mean() - load)
    skipped = tally.skipped if skipped is None else skipped
    bias += (move if skipped is None else move * (1 - skipped.to(move))).to(bias)
