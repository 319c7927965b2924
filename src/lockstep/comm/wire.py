"""Messages between ranks: all that the algorithms written by hand know of the network."""

import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

TAG = 1_000_003
"""Separates our messages from the user's on the same group. (NCCL has no tags: do not mix them there.)"""

Transfer = tuple[Tensor, int]
"""A tensor, and the rank that it goes to or comes from."""


class Messages(dist.Work):
    """In flight. `wait()` before touching what is received or overwriting what is sent."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def get_future(self) -> Any:
        raise RuntimeError("the end of several messages is seen by the thread that waits for them")


T = TypeVar("T")


class Wire:
    """Some ranks of a process group, numbered from 0 among themselves, joined by send and receive.

    `delay`: seconds that each call waits before it sends anything, to imitate a slow network. It is used to check
    that a benchmark shows a delay of known size.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, ranks: list[int] | None = None, delay: float = 0.0):
        chosen = group or dist.group.WORLD
        assert chosen is not None, "a wire needs a process group"
        self.group: dist.ProcessGroup = chosen
        self.delay = delay
        self.ranks = ranks if ranks is not None else list(range(dist.get_world_size(group)))
        self.rank = self.ranks.index(dist.get_rank(group))
        self.size = len(self.ranks)

    @property
    def device(self) -> torch.device:
        """The device on which the group's send and receive need their tensors."""
        if moves_cuda(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def ranks_per_node(self) -> int:
        """From the launcher; ranks of one node have consecutive numbers. If nodes differ in size, the largest.

        The first access is a collective: ranks must agree on it, or they would build different trees.
        """
        return _ranks_per_node.get(self, self._agree_on_ranks_per_node)

    def _agree_on_ranks_per_node(self) -> int:
        mine = torch.tensor([int(os.environ.get("LOCAL_WORLD_SIZE", self.size))], device=self.device)
        others = [rank for rank in range(self.size) if rank != self.rank]
        theirs = [torch.empty_like(mine) for _ in others]
        self.exchange([(mine, other) for other in others], list(zip(theirs, others, strict=True))).wait()
        return min(self.size, int(torch.cat([mine, *theirs]).max()))

    def among(self, ranks: list[int]) -> "Wire":
        """A wire between some of this wire's ranks, including this one."""
        return Wire(self.group, [self.ranks[rank] for rank in ranks], self.delay)

    def exchange(self, send: Sequence[Transfer] = (), receive: Sequence[Transfer] = ()) -> Messages:
        """Issue all sends and receives at once: in sequence, two ranks that both send first would deadlock.

        Both ends know the length, so nothing is sent for an empty tensor.
        """
        if self.delay and send:
            time.sleep(self.delay)
        operations = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=self.ranks[other], tag=TAG)
            for operation, messages in ((dist.isend, send), (dist.irecv, receive))
            for tensor, other in messages
            if tensor.numel()
        ]
        return Messages(dist.batch_isend_irecv(operations) if operations else ())

    def send(self, tensor: Tensor, to: int) -> None:
        self.exchange(send=[(tensor, to)]).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        self.exchange(receive=[(tensor, source)]).wait()


class PerWire(Generic[T]):
    """A value that is computed once per wire, and dropped with its process group."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], T]]
        self._known = weakref.WeakKeyDictionary()

    def get(self, wire: Wire, find: Callable[[], T]) -> T:
        known = self._known.setdefault(wire.group, {})
        ranks = tuple(wire.ranks)
        if ranks not in known:
            known[ranks] = find()
        return known[ranks]


_ranks_per_node: PerWire[int] = PerWire()


def moves_cuda(group: dist.ProcessGroup | None) -> bool:
    """Whether the group's send and receive take CUDA tensors; if not, they are staged through the host."""
    return "nccl" in dist.get_backend(group)


def staging(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tensor itself if the group can move it, else a copy on the host."""
    return tensor if tensor.device.type == "cpu" or moves_cuda(group) else tensor.cpu()
