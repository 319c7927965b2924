"""Is this strategy correct? Each against one process, and its traffic against theory."""

from lockstep.verify.run import Request, Verdict, verify

__all__ = ["Request", "Verdict", "verify"]
