"""Is this strategy correct? Each against one process, its traffic, order and memory against laws."""

from lockstep.verify.presets import PRESETS, preset
from lockstep.verify.run import Request, Verdict, check_request, verify

__all__ = ["PRESETS", "Request", "Verdict", "check_request", "preset", "verify"]
