"""How ranks start: `run_on_ranks(function, *args)` is all that the floors above need to know."""

from typing import TYPE_CHECKING

from lockstep.errors import RankError
from lockstep.launch.adopt import adopt_environment
from lockstep.launch.options import Launch
from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.launch.start import run_on_ranks
    from lockstep.layout.world import World

__all__ = ["Launch", "RankError", "World", "adopt_environment", "run_on_ranks"]
__getattr__ = lazily(__name__, {"World": "lockstep.layout.world", "run_on_ranks": "lockstep.launch.start"})
"""A command's flags are parsed without torch."""
