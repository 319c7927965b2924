"""What came of a judgement."""

from dataclasses import asdict, dataclass, field
from typing import Any

EQUAL, DIFFERS, CANNOT = "equal", "differs", "cannot"
STATUS = {EQUAL: 0, DIFFERS: 1, CANNOT: 2}
"""What the command exits with."""


@dataclass
class Verdict:
    """`what` is one of initial weights, input, loss, gradient, norm, optimizer, weights, replicas, buffers."""

    verdict: str
    step: int | None = None
    """From 1."""
    what: str | None = None
    names: list[str] = field(default_factory=list)
    """Parameters or buffers that differ; BatchNorm modules first, where they are the cause."""
    ranks: list[int] = field(default_factory=list)
    factor: float | None = None
    """The candidate's over the reference's, where one factor explains all."""
    why: str = ""
    look_at: str = ""
    expected: str = ""
    got: str = ""
    ledger: str = ""
    """The reductions that were seen before the step."""
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    """That were compared."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cannot(why: str, *notes: str) -> Verdict:
    return Verdict(CANNOT, why=why, notes=list(notes))
