"""How ranks start: `run_on_ranks(function, *args)` is all that the floors above need to know."""

from lockstep.errors import RankError
from lockstep.launch.adopt import adopt_environment
from lockstep.launch.start import Launch, run_on_ranks
from lockstep.layout.world import World

__all__ = ["Launch", "RankError", "World", "adopt_environment", "run_on_ranks"]
