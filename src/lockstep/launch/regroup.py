"""What ends a step when ranks are lost or come back: every wait for another rank, and the step itself."""

import threading

INTERRUPT = threading.Event()
"""While it is set, waits for other ranks end with an error: their groups are to be formed anew."""


class Regroup(Exception):  # noqa: N818 (nothing is wrong)
    """All ranks have ended the same step, and form their groups anew: a rank has come back."""
