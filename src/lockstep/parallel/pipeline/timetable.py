"""When each pass of a schedule would run, for given costs of passes and messages.

Drawings show it, and the laws predict it: how long a step takes, how long ranks idle, how many
micro-batches they hold. A schedule that deadlocks is found here: every stage waits, and none sends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.errors import UserError
from lockstep.parallel.pipeline.schedule import PASSES, Instruction, Placement


@dataclass(frozen=True)
class Costs:
    """Times of a micro-batch's passes."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def of(self, kind: str) -> float:
        if kind == "backward":
            return self.backward_input + self.backward_weight
        cost: float = getattr(self, kind)
        return cost


@dataclass(frozen=True)
class Span:
    """A pass, and when it ran."""

    instruction: Instruction
    start: float
    end: float


@dataclass
class Timetable:
    """All passes of all ranks."""

    ranks: list[list[Span]] = field(default_factory=list)

    @property
    def span(self) -> float:
        """From the first pass to the last."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    def busy(self, rank: int) -> float:
        return sum(span.end - span.start for span in self.ranks[rank])

    def idle(self, rank: int) -> float:
        """Idle time in the whole step, including its beginning and end."""
        return self.span - self.busy(rank)

    def idle_inside(self, rank: int) -> float:
        """Idle time between its first pass and its last."""
        spans = self.ranks[rank]
        return spans[-1].end - spans[0].start - self.busy(rank) if spans else 0.0

    @property
    def bubble(self) -> float:
        """The share of the step in which a rank stands idle; the mean over the ranks."""
        ranks = len(self.ranks)
        return sum(self.idle(rank) for rank in range(ranks)) / (ranks * self.span) if self.span else 0.0


def timetable(
    schedule: list[list[Instruction]],
    placement: Placement,
    costs: Costs | Sequence[Costs] | None = None,
    message: float = 0.0,
) -> Timetable:
    """Every rank does its list in order; a receive waits for what it receives.

    `costs`: of all chunks of a rank together; or, where parts differ, of each part of the model. `message`: from
    the end of a pass until the next part has received its output.
    """
    if not isinstance(costs, Sequence):
        each = costs or Costs()
        shares = [value / placement.chunks for value in (each.forward, each.backward_input, each.backward_weight)]
        costs = [Costs(*shares)] * (len(schedule) * placement.chunks)
    clock = [0.0] * len(schedule)
    position = [0] * len(schedule)
    sent: dict[tuple[str, int, int], float] = {}  # (what, part that it is for, micro-batch): when
    found = Timetable([[] for _ in schedule])
    waiting = False
    while not waiting:
        waiting = True
        for rank, instructions in enumerate(schedule):
            while position[rank] < len(instructions):
                instruction = instructions[position[rank]]
                if not _done(instruction, rank, placement, costs, message, clock, sent, found):
                    break
                position[rank] += 1
                waiting = False
    stuck = [rank for rank, instructions in enumerate(schedule) if position[rank] < len(instructions)]
    if stuck:
        first = stuck[0]
        raise UserError(f"rank {first} waits forever at {schedule[first][position[first]]}: the schedule deadlocks")
    return found


def _done(
    instruction: Instruction,
    rank: int,
    placement: Placement,
    costs: Sequence[Costs],
    message: float,
    clock: list[float],
    sent: dict[tuple[str, int, int], float],
    found: Timetable,
) -> bool:
    """Do it, unless it has to wait."""
    part, i = placement.part(rank, instruction.chunk), instruction.micro_batch
    match instruction.kind:
        case "send_activation":
            sent["activation", part + 1, i] = clock[rank] + message
        case "send_gradient":
            sent["gradient", part - 1, i] = clock[rank] + message
        case "receive_activation" | "receive_gradient":
            what = instruction.kind.removeprefix("receive_")
            if (what, part, i) not in sent:
                return False
            clock[rank] = max(clock[rank], sent[what, part, i])
        case kind if kind in PASSES:
            end = clock[rank] + costs[part].of(kind)
            found.ranks[rank].append(Span(instruction, clock[rank], end))
            clock[rank] = end
    return True


def most_held(instructions: list[Instruction], placement: Placement) -> float:
    """The most micro-batches whose activations a rank holds; a chunk counts as its share. One is held from its
    forward to the end of its backward, the weights' part included.
    """
    held = most = 0
    for instruction in instructions:
        held += (instruction.kind == "forward") - (instruction.kind in ("backward", "backward_weight"))
        most = max(most, held)
    return most / placement.chunks
