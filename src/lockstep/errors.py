"""The one exception that is the user's to mend."""


class UserError(ValueError):
    """A mistake in what was asked for: says what was given, what is allowed and how to mend it.

    Commands print it as one line without a traceback, from whichever rank it comes.
    """
