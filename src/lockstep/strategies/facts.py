"""What is true of an engine, with its options, before anything runs."""

from dataclasses import dataclass
from typing import Literal

from lockstep.config import Parallel


@dataclass(frozen=True)
class Law:
    """`verify` checks the equal form against one process, and compressions by laws of their own (`verify/laws.py`)."""

    says: str
    """In a few words, for a table."""
    equal_form: Parallel | None = None
    """The setting under which it equals one process, if it has one."""
    linear_only: bool = False
    """Equal only where everything is linear in the gradient: SGD, and no clipping by a norm."""
    trains_apart: bool = False
    """Ranks train apart and average: `verify` simulates them in one process."""


@dataclass(frozen=True)
class Facts:
    """What is true of a strategy: what it divides, what it overlaps, what to try next."""

    says: str
    """What it does, in a few words."""
    sends: str = "2Ψ(n-1)/n"
    """What a rank sends in a step, as a formula: Ψ trained elements, n ranks."""
    divides: tuple[bool, bool, bool] = (False, False, False)
    """Whether each rank holds one n-th of parameters, of gradients, of the optimizer's state."""
    law: Law | None = None
    """What `verify` checks instead, where it is not equal to one process."""
    overlaps: bool = True
    """Communication is issued while forward or backward still computes."""
    averages_every: int = 1
    """After this many steps, everything that happens only in some steps has happened."""
    sends_every_micro_batch: bool = False
    """Gradients of each micro-batch are reduced at once; else once per step."""
    advice: tuple[str, ...] = ()
    """Flags to try where a step waits for communication."""
    smaller: str | None = None
    """The strategy to try where memory runs out: it divides one thing more."""
    planned: Literal["no", "alone", "always"] = "no"
    """Whether the planner chooses it among those that divide as much: always, or where no axis cuts the model."""
    one_by_one: bool = False
    """It has a collective for each parameter."""

    @property
    def zero_stage(self) -> int:
        """ZeRO's: how many of optimizer state, gradients and parameters the ranks divide, in that order."""
        return sum(self.divides)


GATHER_ONCE = "--parallel.sharding SHARD_GRAD_OP (parameters are gathered once, not twice, for more memory)"
"""Advice for engines that shard parameters."""
