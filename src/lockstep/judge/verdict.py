"""What came of a judgement."""

from collections.abc import Iterable
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


def differs(
    step: int,
    what: str,
    names: Iterable[str],
    ranks: list[int],
    why: str,
    look_at: str,
    factor: float | None = None,
    expected: str = "",
    got: str = "",
) -> Verdict:
    return Verdict(DIFFERS, step, what, list(names), ranks, factor, why, look_at, expected, got)


def words_of(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def listing(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
