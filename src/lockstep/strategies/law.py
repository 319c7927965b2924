"""What a strategy is held to that is not equal to one process by nature."""

from dataclasses import dataclass

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
