"""Schedules: what each rank does in a step, as lists of instructions, independent of processes.

One worker executes whatever list it is given, so a list can be read, drawn and tested without a rank. Without a
pipeline there is one stage, and the list is the simplest one: forward 0, backward 0, forward 1, ..., reduce, step.

A pipeline cuts a model into consecutive parts, and gives each of p ranks one of them, or several ("chunks").
m micro-batches follow each other through the parts. With forward = 1 and backward = 2 (1 for the gradient of the
inputs and 1 for that of the weights), a step of m micro-batches takes 3m plus the idle time:

    name           idle per rank            holds at most         in a few words
    naive          3m(p-1)                  1 micro-batch         one micro-batch after the other, one stage at a time
    gpipe          3(p-1)                   m                     all forwards, then all backwards
    1f1b           3(p-1)                   p - r at stage r      a backward as soon as there is one
    interleaved    3(p-1)/v                 more than 1f1b        v chunks per rank: shorter parts fill the pipeline
    zb-h1          p-1                      p                     backward in two: the weights' part waits for a gap
    zb-v           (p-1)/2, at the ends     p                     the same in two chunks that go down the ranks and come
                                                                  back, so that the first rank also has the last part
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.errors import UserError

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_activation",
    "receive_activation",
    "send_gradient",
    "receive_gradient",
    "native_passes",
    "reduce",
    "step",
]
PASSES = ("forward", "backward", "backward_input", "backward_weight")
"""What computes."""


@dataclass(frozen=True)
class Instruction:
    """One instruction. `reduce`, `step` and `native_passes` (all passes, run by PyTorch) apply to the whole step, the
    others to one micro-batch.
    """

    kind: Kind
    micro_batch: int = 0
    chunk: int = 0
    """Which of the rank's parts of the model, where it has several."""
    reduces: bool = False
    """The last pass that adds to the gradients of its chunk: each bucket is reduced as soon as it is complete."""

    def __str__(self) -> str:
        about = "" if self.kind in ("reduce", "step") else f" {self.micro_batch}"
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind}{about}{chunk}" + (" and reduce" if self.reduces else "")


Order = Iterator[Instruction]


def one_stage(micro_batches: int) -> Order:
    """Forward and backward of each micro-batch; then reduce what the last backward has not, and step the optimizer."""
    for micro_batch in range(micro_batches):
        yield Instruction("forward", micro_batch)
        yield Instruction("backward", micro_batch, reduces=micro_batch == micro_batches - 1)
    yield Instruction("reduce")
    yield Instruction("step")


# ---- where the parts are -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Maps the parts of the model to (rank, chunk)."""

    stages: int
    chunks: int = 1
    folded: bool = False
    """The second chunk goes back up the ranks: chunk 1 of rank r is part 2p - 1 - r."""

    @property
    def parts(self) -> int:
        return self.stages * self.chunks

    def part(self, rank: int, chunk: int) -> int:
        if self.folded and chunk == 1:
            return 2 * self.stages - 1 - rank
        return chunk * self.stages + rank

    def place(self, part: int) -> tuple[int, int]:
        """(rank, chunk)."""
        chunk, rank = divmod(part, self.stages)
        return (self.stages - 1 - rank if self.folded and chunk == 1 else rank), chunk


# ---- the orders of passes ------------------------------------------------------------------------------------------


def naive(rank: int, stages: int, micro_batches: int, chunks: int) -> Order:
    for i in range(micro_batches):
        yield Instruction("forward", i)
        yield Instruction("backward", i)


def gpipe(rank: int, stages: int, micro_batches: int, chunks: int) -> Order:
    yield from (Instruction("forward", i) for i in range(micro_batches))
    yield from (Instruction("backward", i) for i in range(micro_batches))


def one_forward_one_backward(rank: int, stages: int, micro_batches: int, chunks: int) -> Order:
    """Rank r runs p - r forwards ahead, just enough to be busy until the first backward reaches it."""
    ahead = min(stages - rank - 1, micro_batches)
    yield from (Instruction("forward", i) for i in range(ahead))
    for i in range(micro_batches):
        if ahead + i < micro_batches:
            yield Instruction("forward", ahead + i)
        yield Instruction("backward", i)


def interleaved(rank: int, stages: int, micro_batches: int, chunks: int) -> Order:
    """As 1f1b, over all chunks: p micro-batches through the first chunk, the same through the second, and so on; then
    the next p. Backward goes through the chunks from the last one.
    """

    def numbered(k: int) -> tuple[int, int]:
        """(micro-batch, how many chunks it has passed already) of a rank's k-th pass."""
        group, within = divmod(k, stages * chunks)
        return group * stages + within % stages, within // stages

    def forward(k: int) -> Instruction:
        micro_batch, chunk = numbered(k)
        return Instruction("forward", micro_batch, chunk)

    def backward(k: int) -> Instruction:
        micro_batch, behind = numbered(k)
        return Instruction("backward", micro_batch, chunks - 1 - behind)

    total = micro_batches * chunks
    # The first backward reaches rank r after p micro-batches have gone forward through all chunks, and earlier ranks
    # later still: by two passes, forward and backward, for each rank in between.
    ahead = min((stages - rank - 1) * (1 if chunks == 1 else 2) + (chunks - 1) * stages, total)
    yield from (forward(k) for k in range(ahead))
    for k in range(total):
        if ahead + k < total:
            yield forward(ahead + k)
        yield backward(k)


def zero_bubble_h1(rank: int, stages: int, micro_batches: int, chunks: int) -> Order:
    """As 1f1b, but the weight passes of rank r lag by r micro-batches: so the last ranks, which hold the fewest in
    1f1b, send gradients back sooner, and all ranks hold p.
    """
    ahead = min(stages - rank, micro_batches)
    yield from (Instruction("forward", i) for i in range(ahead))
    for i in range(micro_batches):
        yield Instruction("backward_input", i)
        if i >= rank:
            yield Instruction("backward_weight", i - rank)
        if ahead + i < micro_batches:
            yield Instruction("forward", ahead + i)
    yield from (Instruction("backward_weight", i) for i in range(max(0, micro_batches - rank), micro_batches))


def zero_bubble_v(rank: int, stages: int, micro_batches: int, chunks: int) -> Order:
    """Two chunks, down the ranks and back: a micro-batch's last part is on the rank of its first, so gradients start
    where activations do, and no rank idles between its first pass and its last.
    """
    done = {(kind, chunk): 0 for kind in PASSES for chunk in (0, 1)}

    def next_of(kind: Kind, chunk: int) -> Order:
        number = done[kind, chunk]
        if number < micro_batches:
            done[kind, chunk] += 1
            yield Instruction(kind, number, chunk)

    def forward(chunk: int) -> Order:
        yield from next_of("forward", chunk)

    def backward(chunk: int) -> Order:
        yield from next_of("backward_input", chunk)
        yield from next_of("backward_weight", chunk)

    for _ in range(2 * (stages - rank) - 1):  # until the first micro-batch is back from the last rank
        yield from forward(0)
    for _ in range(rank):
        yield from forward(1)
        yield from forward(0)
    for _ in range(stages - rank):  # gradients come from the ranks before
        yield from forward(1)
        yield from backward(1)
    while min(done["forward", 0], done["forward", 1]) < micro_batches:  # six passes, a sixth of each kind
        for chunk in (0, 1):
            yield from forward(chunk)
            yield from backward(chunk)
    for _ in range(rank):  # gradients first: the ranks before are waiting for them
        yield from next_of("backward_input", 0)
        yield from next_of("backward_input", 1)
    for _ in range(stages - rank):
        yield from backward(0)
    for chunk in (1, 0):
        while done["backward_weight", chunk] < micro_batches:
            yield from next_of("backward_weight", chunk)


ORDERS: dict[str, Callable[[int, int, int, int], Order]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
}
SCHEDULES = tuple(ORDERS)


# ---- the whole list ------------------------------------------------------------------------------------------------


def pipeline_schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> list[list[Instruction]]:
    """For every stage, that is every rank of the pipeline, what it does in a step.

        stages = lockstep.pipeline_schedule("1f1b", stages=4, micro_batches=8)
        print([(i.kind, i.micro_batch) for i in stages[0]])

    `chunks`: parts of the model per rank, of interleaved (2 or more to be of use) and zb-v (always 2).
    """
    check_schedule(name, stages, micro_batches, chunks)
    placement = placement_of(name, stages, chunks)
    lists = []
    for rank in range(stages):
        passes = with_reductions([*ORDERS[name](rank, stages, micro_batches, placement.chunks)])
        lists.append([*with_messages(passes, rank, placement), Instruction("reduce"), Instruction("step")])
    return lists


def forward_only(placement: Placement) -> list[list[Instruction]]:
    """One batch through all parts, for evaluation."""
    orders: list[list[Instruction]] = [[] for _ in range(placement.stages)]
    for part in range(placement.parts):
        rank, chunk = placement.place(part)
        orders[rank] += with_messages([Instruction("forward", 0, chunk)], rank, placement)
    return orders


def placement_of(name: str, stages: int, chunks: int = 1) -> Placement:
    return Placement(stages, 2, folded=True) if name == "zb-v" else Placement(stages, chunks)


def check_schedule(name: str, stages: int, micro_batches: int, chunks: int = 1) -> None:
    if name not in ORDERS:
        raise UserError(f"the schedule is {name!r}, but it must be one of {', '.join(SCHEDULES)}")
    for what, value in (("stages", stages), ("micro-batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise UserError(f"a pipeline of {value} {what} does nothing; give 1 or more")
    if name == "interleaved" and micro_batches % stages:
        fits = -(-micro_batches // stages) * stages
        raise UserError(
            f"interleaved takes micro-batches in groups of one per stage, and {micro_batches} are no multiple of "
            f"{stages}; use {fits}, or 1f1b"
        )
    if chunks > 1 and name not in ("interleaved", "zb-v"):
        raise UserError(f"{name} has one part of the model per rank, and chunks is {chunks}; use interleaved")
    if name == "zb-v" and chunks > 2:
        raise UserError(f"zb-v has two parts of the model per rank, and chunks is {chunks}; use 2, or interleaved")


def with_reductions(passes: list[Instruction]) -> list[Instruction]:
    """The passes, with the last one that adds to a chunk's gradients marked to reduce them."""
    last = {i.chunk: n for n, i in enumerate(passes) if i.kind in ("backward", "backward_weight")}
    return [replace(i, reduces=last.get(i.chunk) == n) for n, i in enumerate(passes)]


def with_messages(order: Iterable[Instruction], rank: int, placement: Placement) -> Order:
    """The passes, with what is sent and received between them. Neighbouring parts on one rank need no message."""
    for instruction in order:
        i, chunk = instruction.micro_batch, instruction.chunk
        part = placement.part(rank, chunk)
        before = part - 1 if part > 0 and placement.place(part - 1)[0] != rank else None
        after = part + 1 if part + 1 < placement.parts and placement.place(part + 1)[0] != rank else None
        if instruction.kind == "forward":
            if before is not None:
                yield Instruction("receive_activation", i, chunk)
            yield instruction
            if after is not None:
                yield Instruction("send_activation", i, chunk)
        elif instruction.kind in ("backward", "backward_input"):
            if after is not None:
                yield Instruction("receive_gradient", i, chunk)
            yield instruction
            if before is not None:
                yield Instruction("send_gradient", i, chunk)
        else:
            yield instruction
