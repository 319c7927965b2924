"""What a step costs beside what its laws say: calls by axis, what is issued early, what is held at once.

CPU ranks cannot measure a layout's seconds, but they can count: a call too many, a reduction that waits for the end of
backward, a gathered weight that is kept, a schedule that has become another. `lockstep verify --cost` shows the counts.
"""

from dataclasses import dataclass, field
from typing import Any

from lockstep.comm.ledger import Ledger
from lockstep.measure.memory import held_parts
from lockstep.parallel.law import Sent, Shape
from lockstep.parallel.zero.law import most_held
from lockstep.strategies import ParallelModel

MODEL_AXES = ("data", "tp", "cp", "ep", "pp")
Pair = tuple[float, float]
"""Counted, and by the law."""


@dataclass
class Cost:
    """Of one rank, or the worst of all ranks."""

    calls: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """By axis: counted, and by the law where it says so."""
    early: Pair | None = None
    """Reductions of gradients that were issued before the last backward had ended, of all."""
    gathered: Pair | None = None
    """Bytes of other ranks' parameters at once."""
    state: Pair | None = None
    """Bytes of parameters, gradients and optimizer state after a step."""
    micro_batches: Pair | None = None
    """Held at once."""
    idle: Pair | None = None
    """Of a stage, where a forward takes 1 and a backward 2."""

    def count_calls(self, ledger: Ledger, laws: dict[str, Sent | None]) -> None:
        for axis in MODEL_AXES:
            counted = ledger.traffic(axis).collectives
            law = laws.get(axis)
            if counted or (law is not None and law.collectives):
                self.calls[axis] = (counted, None if law is None else law.collectives)

    def weigh_state(self, strategy: ParallelModel, shapes: list[Shape], itemsize: int) -> list[str]:
        """Laws that are broken. `shapes`: of the parameters of this stage, as the axes of the model have cut them."""
        layout, divides = strategy.layout, type(strategy.engine).facts(strategy.parallel).divides
        n = layout.gradient.size // layout.degrees.replicate  # that hold one copy together
        parts = [most_held(shapes, itemsize, n if divided else 1) for divided in divides]
        law = parts[0] + parts[1] + ADAM * parts[2]
        counted = sum(held_parts(strategy))
        self.state = (counted, law)
        if counted <= law:
            return []
        return [f"memory: {counted:,.0f} bytes of state are held after a step, and at most {law:,.0f} by the law"]


ADAM = 2
"""Moments."""


def worst(costs: list[Cost]) -> Cost:
    """Of all ranks, by each count the rank that is furthest from its law."""
    found = Cost()
    for axis in MODEL_AXES:
        if calls := [c.calls[axis] for c in costs if axis in c.calls]:
            found.calls[axis] = max(calls, key=lambda one: one[0])
    for name in ("early", "gathered", "state", "micro_batches", "idle"):
        pairs: list[Any] = [pair for c in costs if (pair := getattr(c, name)) is not None]
        least = name == "early"
        if pairs:
            setattr(found, name, (min if least else max)(pairs, key=lambda one: one[0] - (one[1] if least else 0)))
    return found
