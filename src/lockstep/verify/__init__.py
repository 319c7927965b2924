"""Is this strategy correct? Each against one process, and its traffic against theory."""

from lockstep.verify.run import Request, Verdict, check_request, verify

__all__ = ["Request", "Verdict", "check_request", "verify"]
