"""Where the time of a step went."""

from lockstep.comm.ledger import Ledger
from lockstep.strategies.step import Phases


def step_breakdown(phases: Phases, ledger: Ledger, data_seconds: float = 0.0) -> dict[str, float]:
    """Milliseconds of a step by phase; what the step spent waiting for communication is taken out of its phase."""
    seconds = phases.seconds()
    breakdown = {"data_ms": 1e3 * data_seconds}
    for phase in ("forward", "backward", "optimizer"):
        waited = sum(ledger.exposed_seconds(within=(start, end)) for name, start, end in phases.spans if name == phase)
        breakdown[f"{phase}_ms"] = 1e3 * max(0.0, seconds.get(phase, 0.0) - waited)
    return {**breakdown, "exposed_ms": 1e3 * ledger.exposed_seconds()}
