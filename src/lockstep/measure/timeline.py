"""One step of one rank as a picture would show it: its phases, and every collective from its issue to its end."""

from typing import Any

from lockstep.comm.ledger import Mark, seconds_between
from lockstep.strategies import ParallelModel


def timeline(strategy: ParallelModel) -> dict[str, Any]:
    """Of the last step, in milliseconds since it began."""
    ledger = strategy.ledger
    started = ledger.started
    assert started is not None, "a step must have been taken"

    def ms(moment: Mark | None) -> float | None:
        return None if moment is None else 1e3 * seconds_between(started, moment)

    return {
        "rank": strategy.world.rank,
        "phases": [{"name": name, "start": ms(start), "end": ms(end)} for name, start, end in strategy.phases.spans],
        "collectives": [
            {
                "operation": entry.operation,
                "purpose": entry.purpose,
                "subject": entry.subject,
                "nbytes": entry.nbytes,
                "issued": ms(entry.issued),
                "over": ms(entry.over),
                "wait_started": ms(entry.wait_started),
                "wait_ended": ms(entry.wait_ended),
            }
            for entry in ledger.entries
        ],
    }
