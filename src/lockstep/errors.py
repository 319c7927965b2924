"""The exceptions that reach the person at the keyboard."""


class UserError(ValueError):
    """A mistake in what was asked for: says what was given, what is allowed and how to mend it.

    Commands print it as one line without a traceback, from whichever rank it comes.

        try:
            lockstep.pipeline_schedule("1f2b", stages=4, micro_batches=8)
        except lockstep.UserError as mistake:
            print(mistake)
    """


class RankError(RuntimeError):
    """A rank failed. The message is the first failing rank's own traceback."""


class PeerError(RuntimeError):
    """Another rank died, did not answer in time, or called something else."""


class HangError(RuntimeError):
    """A collective did not end in time. The message says which rank did not come, and what each was doing."""
