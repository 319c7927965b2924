"""On a rank: every call of torch.distributed that an exercise makes, as it makes it.

The functions are replaced before the exercise is imported, by ones that write down what was called and pass it on. A
call goes to a file at once: when the ranks hang, what they did is there to be drawn.
"""

import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

SENDS, RECEIVES = ("send", "isend"), ("recv", "irecv")
PAYLOADS = {  # operation -> positions or names of the argument whose bytes it is about
    "all_reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "reduce": (0, "tensor"),
    "all_gather": (0, "tensor_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input"),
    "all_to_all_single": (1, "input"),
    "scatter": (1, "scatter_list"),
    "gather": (1, "gather_list"),
    **dict.fromkeys((*SENDS, *RECEIVES), (0, "tensor")),
    "barrier": (0, ""),
}
PEERS: dict[str, tuple[int, int | None]] = {  # operation -> position of its other rank or root, and its default
    **dict.fromkeys((*SENDS, *RECEIVES), (1, None)),
    **dict.fromkeys(("broadcast", "reduce"), (1, 0)),
    **dict.fromkeys(("scatter", "gather"), (2, 0)),
}
NEW_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""torch 2.13's, which the older releases do not have yet."""
ALIKE = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
"""The same bytes, in one tensor or in a list."""
GRADING = ".grading"
"""Ending of the file that is there while a rank is in the grader's own calls."""
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


@dataclass
class Call:
    """One call of one rank."""

    operation: str
    elements: int
    """Of the whole tensor: for an all-gather what comes out, for a reduce-scatter what goes in."""
    nbytes: int
    peer: int | None
    """Of a message: the other rank; of a broadcast, reduce, scatter or gather: its root."""
    line: int
    """Of the exercise."""
    issued: float
    ranks: int
    """Of the group."""
    waited: float = 0.0
    """Seconds that the rank stood still for it."""
    ended: float = 0.0
    """When it was known to be over."""
    place: Callable[[], Tensor | None] = lambda: None
    """The tensor that it writes to, as long as it is referenced."""

    @property
    def sent(self) -> float:
        """Bytes that this rank sends: of a message all, of a collective what a ring would send."""
        n = self.ranks
        match self.operation:
            case "send" | "isend":
                return self.nbytes
            case "all_reduce":
                return 2 * self.nbytes * (n - 1) / n
            case "recv" | "irecv" | "barrier":
                return 0
            case "broadcast" | "reduce":
                return self.nbytes
            case _:
                return self.nbytes * (n - 1) / n


class Recorder:
    """The calls of one rank."""

    def __init__(self, exercise: Path, log: Path, rank: int) -> None:
        self.exercise, self.rank = str(exercise), rank
        self.calls: list[Call] = []
        self._log = log.open("a", encoding="utf-8")
        self._grading = log.with_suffix(GRADING)
        self._inside = threading.local()

    def install(self) -> None:
        """From now on, until the process ends."""
        for name in (*PAYLOADS, *OBJECTS, *NEW_NAMES):
            original = getattr(c10d, name, None)
            if original is not None:
                recorded = self._recorded(NEW_NAMES.get(name, name), original)
                for module in (dist, c10d):
                    setattr(module, name, recorded)

    @contextmanager
    def off(self) -> Iterator[None]:
        """What the grader does itself is no part of the exercise. While it does it, a file says so."""
        before, self._inside.depth = getattr(self._inside, "depth", 0), 1
        self._grading.touch()
        try:
            yield
        finally:
            self._inside.depth = before
            self._grading.unlink(missing_ok=True)

    @contextmanager
    def during(self) -> Iterator[list[Call]]:
        """The calls that are made inside."""
        first, found = len(self.calls), list[Call]()
        try:
            yield found
        finally:
            found += self.calls[first:]

    def _recorded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "depth", 0):
                return original(*args, **kwargs)
            call = self._note(name, args, kwargs)
            self._inside.depth = 1
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside.depth = 0
            if result is not None and hasattr(result, "wait"):
                return Waited(result, call)
            call.ended = time.monotonic()
            call.waited = call.ended - call.issued
            return result

        run.__name__ = name
        return run

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        elements, nbytes = 0, 0
        payload: Any = None
        if name in PAYLOADS:
            position, keyword = PAYLOADS[name]
            payload = kwargs.get(keyword, args[position] if len(args) > position else None)
            if payload is None and name in ("scatter", "gather"):  # not the root: its part has the size
                own = kwargs.get("tensor", args[0] if args else None)
                payload = [own] * _ranks(args, kwargs)
            for tensor in payload if isinstance(payload, list | tuple) else [payload]:
                if isinstance(tensor, Tensor):
                    elements, nbytes = elements + tensor.numel(), nbytes + tensor.nbytes
        peer = _peer(name, args, kwargs)
        if name in (*SENDS, *RECEIVES) and peer is not None:
            self._refuse_stranger("sends to" if name in SENDS else "receives from", peer)
        call = Call(name, elements, nbytes, peer, self._line(), time.monotonic(), _ranks(args, kwargs))
        if isinstance(payload, Tensor):
            call.place = weakref.ref(payload)
        self.calls.append(call)
        row = {"op": name, "elements": elements, "peer": call.peer, "line": call.line, "at": call.issued}
        self._log.write(json.dumps(row) + "\n")
        self._log.flush()
        return call

    def _refuse_stranger(self, does: str, peer: int) -> None:
        """A message to a rank that does not exist would be waited for without a word of why."""
        size = dist.get_world_size()
        if peer == self.rank or not 0 <= peer < size:
            there = "that is itself" if peer == self.rank else f"there are ranks 0 to {size - 1}"
            raise ValueError(f"rank {self.rank} {does} rank {peer}, but {there}")

    def _line(self) -> int:
        return line_in(self.exercise, sys._getframe(2)) or 0


def line_in(file: str, frame: FrameType | None) -> int | None:
    """Where in this file that call came from; None: from nowhere there."""
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return None if frame is None else frame.f_lineno


class Waited:
    """A work that says how long it was waited for."""

    def __init__(self, work: Any, call: Call) -> None:
        self._work, self._call = work, call

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        result = self._work.wait(*args, **kwargs)
        now = time.monotonic()
        self._call.ended = self._call.ended or now  # the first time: afterwards it is over
        self._call.waited += now - start
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _peer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    if name not in PEERS:
        return None
    position, default = PEERS[name]
    given = [kwargs.get(key) for key in ("src", "dst", "group_src", "group_dst")]
    found = next((rank for rank in given if rank is not None), args[position] if len(args) > position else None)
    return default if found is None else int(found)


def _ranks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
    return int(dist.get_world_size(group)) if dist.is_initialized() else 1
