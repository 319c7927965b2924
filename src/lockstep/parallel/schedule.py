"""A schedule: what one rank does in a step, as a list of instructions. It knows nothing of processes.

One worker executes whatever list it is given (`strategies/worker.py`), so the list can be read, drawn and tested
without a rank. Without a pipeline there is one stage, and the list is the simplest one:

    forward 0, backward 0, forward 1, backward 1, ..., reduce, step
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "reduce", "step"]


@dataclass(frozen=True)
class Instruction:
    """One thing to do. `reduce` and `step` are about the whole step, the others about one micro-batch."""

    kind: Kind
    micro_batch: int = 0
    chunk: int = 0
    """Which of the rank's parts of the model, where it has several."""


def one_stage(micro_batches: int) -> Iterator[Instruction]:
    """Each micro-batch forward and backward; then the gradients meet, and the optimizer steps."""
    for micro_batch in range(micro_batches):
        yield Instruction("forward", micro_batch)
        yield Instruction("backward", micro_batch)
    yield Instruction("reduce")
    yield Instruction("step")
