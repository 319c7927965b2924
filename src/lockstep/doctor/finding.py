"""One thing that was looked at."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: what was looked at, whether it is well, and how to mend it."""

    topic: str
    what: str
    verdict: Verdict = "fine"
    mend: str = ""
    """What to do about it; empty where nothing is to be done."""


def noted(topic: str, what: str, mend: str) -> Finding:
    """Fine, unless there is something to be done about it."""
    return Finding(topic, what, "note" if mend else "fine", mend)
