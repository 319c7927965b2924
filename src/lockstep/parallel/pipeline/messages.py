"""What goes from one rank of a pipeline to another: activations forward, gradients backward.

Both sides know the schedule, so both know which messages will pass between them, and in which order the sender sends
them. The receiver issues receives in that order, one message ahead: while it computes with one, the next is in flight
(in shared memory it has already arrived). It may use them in another order. A send returns at once; its tensor
is kept until the send is complete.

On GPUs each direction between two ranks has its own process group: NCCL runs the messages of a pair in one group
in order, and a receive that waits would block a send that the other side is waiting for.

Shapes are not configured. In the first step with a batch of some shape, every message is preceded by a header with its
shapes and dtypes; from then on both sides know them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.collectives import recv_async, send_async
from lockstep.comm.ledger import about
from lockstep.comm.pending import Pending
from lockstep.errors import UserError
from lockstep.layout.group import Group, shared_group
from lockstep.parallel.pipeline.schedule import Instruction, Placement

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool),
)
MOST_TENSORS, MOST_DIMENSIONS = 8, 6
MOST_SHAPES = 256
"""How many shapes of batches are remembered."""
HEADER = 1 + MOST_TENSORS * (3 + MOST_DIMENSIONS)
"""Numbers of a header: how many tensors; of each its dtype, whether it has a gradient, its dimensions."""


@dataclass(frozen=True)
class Message:
    """Activations for a part of the model, or gradients of its outputs, of one micro-batch."""

    what: str
    part: int
    micro_batch: int


@dataclass(frozen=True)
class Kind:
    """What is known of a tensor before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


Kinds = tuple[Kind, ...]


def sent_by(rank: int, schedule: list[list[Instruction]], placement: Placement) -> Iterator[tuple[int, Message]]:
    """(to which rank, what), in the order in which this rank sends."""
    for instruction in schedule[rank]:
        part = placement.part(rank, instruction.chunk)
        if instruction.kind == "send_activation":
            yield placement.place(part + 1)[0], Message("activation", part + 1, instruction.micro_batch)
        elif instruction.kind == "send_gradient":
            yield placement.place(part - 1)[0], Message("gradient", part - 1, instruction.micro_batch)


def directions(group: Group, device: torch.device) -> tuple[Group, Group]:
    """Groups for what goes to later ranks, and to earlier ones."""
    if group.size == 1 or device.type != "cuda" or "nccl" not in group.backend:
        return group, group
    ranks = dist.get_process_group_ranks(group.native)
    first = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # messages, scheduled before compute's kernels
    made = [shared_group(ranks, "nccl", lane=lane, options=first) for lane in ("later", "earlier")]
    later, earlier = (Group(group.axis, group.rank, group.size, native) for native in made)
    return later, earlier


@dataclass
class Receiving:
    """A message whose receives have been issued."""

    tensors: list[Tensor]
    kinds: Kinds
    pending: list[Pending]


class MessageQueue:
    """Messages from one rank, in the order in which it sends them."""

    def __init__(self, sender: int, expected: list[Message], group: Group, device: torch.device) -> None:
        self.sender, self.expected, self.group, self.device = sender, expected, group, device
        self._next = 0  # to be asked for
        # In shared memory a message is already in the receiver's reach: to copy it out during a computation would only
        # take a core from that computation, and cost a second wake-up.
        self._ahead = "shm" not in group.backend
        self._asked: dict[Message, Receiving] = {}

    def begin(self, known: dict[Message, Kinds] | None) -> None:
        """A new step. `known`: what each message is; None: it has a header."""
        self._next, self._known = 0, known
        if known is not None and self._ahead:
            self._ask()

    def take(self, message: Message) -> tuple[list[Tensor], Kinds]:
        """Wait for it; the next message is then in flight."""
        while message not in self._asked:
            self._ask()
        receiving = self._asked.pop(message)
        for pending in receiving.pending:
            pending.wait()
        if self._known is not None and self._ahead:
            self._ask()
        return receiving.tensors, receiving.kinds

    def _ask(self) -> None:
        if self._next == len(self.expected):
            return
        message = self.expected[self._next]
        self._next += 1
        kinds = self._known[message] if self._known is not None else self._header()
        tensors = [torch.empty(kind.shape, dtype=kind.dtype, device=self.device) for kind in kinds]
        with about(f"{message.what} {message.micro_batch} for part {message.part}"):
            pending = [recv_async(t, self.sender, self.group, purpose="activations") for t in tensors]
        self._asked[message] = Receiving(tensors, kinds, pending)

    def _header(self) -> Kinds:
        numbers = torch.empty(HEADER, dtype=torch.int64, device=self.device)
        recv_async(numbers, self.sender, self.group, purpose="shapes").wait()
        return read_header(numbers.tolist())


class Post:
    """All messages of one rank of a pipeline."""

    def __init__(
        self,
        schedule: list[list[Instruction]],
        placement: Placement,
        group: Group,
        device: torch.device,
        towards: tuple[Group, Group] | None = None,
    ) -> None:
        """`towards`: what `directions` has made already, for another post of the same ranks."""
        self.device, self.rank = device, group.rank
        self.towards = towards or directions(group, device)
        self._later, self._earlier = self.towards
        self._inboxes: dict[int, MessageQueue] = {}
        for sender in range(group.size):
            for_me = [message for to, message in sent_by(sender, schedule, placement) if to == group.rank]
            if for_me and sender != group.rank:
                way = self._later if sender < group.rank else self._earlier
                self._inboxes[sender] = MessageQueue(sender, for_me, way, device)
        self._from = {message: sender for sender, inbox in self._inboxes.items() for message in inbox.expected}
        self._to = {message: to for to, message in sent_by(group.rank, schedule, placement)}
        self._learnt: dict[object, dict[Message, Kinds]] = {}
        self._learning: dict[Message, Kinds] | None = None
        self._shape: object = None
        self._gone: list[tuple[list[Tensor], list[Pending]]] = []

    def begin(self, shape: object) -> None:
        """A new step, of a batch of this shape: all ranks have the same."""
        known = self._learnt.get(shape)
        self._known, self._shape = known or {}, shape
        self._learning = None if known is not None else {}
        for inbox in self._inboxes.values():
            inbox.begin(known)

    def receive(self, message: Message) -> tuple[list[Tensor], Kinds]:
        tensors, kinds = self._inboxes[self._from[message]].take(message)
        if self._learning is not None:
            self._learning[message] = kinds
        return tensors, kinds

    def send(self, message: Message, tensors: list[Tensor], has_gradient: list[bool]) -> None:
        to = self._to[message]
        group = self._later if to > self.rank else self._earlier
        check_sendable(tensors, f"the {message.what} for part {message.part}")
        tensors = [t.detach().contiguous() for t in tensors]
        self._check_known(message, tensors, has_gradient)
        pending = []
        if self._learning is not None:
            numbers = torch.tensor(header(tensors, has_gradient), dtype=torch.int64, device=self.device)
            pending.append(send_async(numbers, to, group, purpose="shapes"))
            tensors_kept = [numbers, *tensors]
        else:
            tensors_kept = tensors
        with about(f"{message.what} {message.micro_batch} for part {message.part}"):
            pending += [send_async(t, to, group, purpose="activations") for t in tensors]
        self._gone = [(kept, sends) for kept, sends in self._gone if not all(send.is_over for send in sends)]
        self._gone.append((tensors_kept, pending))

    def _check_known(self, message: Message, tensors: list[Tensor], has_gradient: list[bool]) -> None:
        """The receiver has issued receives for the shapes that both sides learnt in an earlier step."""
        kinds = tuple(Kind(tuple(t.shape), t.dtype, so) for t, so in zip(tensors, has_gradient, strict=True))
        if self._learning is not None:
            self._learning[message] = kinds
        elif self._known[message] != kinds:
            raise UserError(
                f"the {message.what} for part {message.part} was {self._known[message]} in an earlier step with a "
                f"batch of this shape, and is {kinds} now; after freezing or unfreezing layers make a new Pipeline"
            )

    def end(self) -> None:
        """Wait for all sends. What was learnt of messages is kept only now: a step that fails teaches nothing."""
        for _, pending in self._gone:
            for one in pending:
                one.wait()
        self._gone = []
        if self._learning is not None:
            if len(self._learnt) == MOST_SHAPES:  # all ranks forget the same one
                del self._learnt[next(iter(self._learnt))]
            self._learnt[self._shape], self._learning = self._learning, None


def check_sendable(tensors: list[Any], what: str) -> None:
    """What a header can describe."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES or tensor.dim() > MOST_DIMENSIONS:
            kind = f"{tensor.dtype}, {tensor.dim()} dimensions" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(
                f"{what} has {kind} in it; between stages pass tensors of at most {MOST_DIMENSIONS} dimensions, and "
                f"no complex ones"
            )
    if len(tensors) > MOST_TENSORS:
        raise UserError(f"{what} is {len(tensors)} tensors; between stages pass at most {MOST_TENSORS}")


def header(tensors: list[Tensor], has_gradient: list[bool]) -> list[int]:
    numbers = [len(tensors)]
    for tensor, so in zip(tensors, has_gradient, strict=True):
        room = [0] * (MOST_DIMENSIONS - tensor.dim())
        numbers += [DTYPES.index(tensor.dtype), int(so), tensor.dim(), *tensor.shape, *room]
    return numbers + [0] * (HEADER - len(numbers))


def read_header(numbers: list[int]) -> Kinds:
    found = []
    for i in range(numbers[0]):
        dtype, so, dimensions, *sizes = numbers[1 + i * (3 + MOST_DIMENSIONS) :][: 3 + MOST_DIMENSIONS]
        found.append(Kind(tuple(sizes[:dimensions]), DTYPES[dtype], bool(so)))
    return tuple(found)
