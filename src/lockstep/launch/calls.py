"""The last call of each group on this rank, over or not: what a hang is explained by.

Of gloo's and NCCL's groups torch's flight recorder knows it; a backend of ours reports it itself (`sources`).
"""

import functools
import json
import os
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Protocol

import torch.distributed as dist

from lockstep.words import listed

RECORDED = {"TORCH_FR_BUFFER_SIZE": "64"}
"""Calls that the recorder keeps: enough to have the last one of each group."""


@dataclass(frozen=True)
class Call:
    """A collective, or a message, as one rank sees it."""

    group: str
    """The axes that it spans, or torch's name for it."""
    ranks: tuple[int, ...]
    """Of the group, in the world's numbering."""
    number: int
    """Among the collectives of its group, counted from the first; 0: a message, which has none."""
    what: str
    """all_reduce of 1,024 float32"""
    over: bool
    waits_for: int | None = None
    """The rank, where this one knows it."""
    record: int = field(default=0, compare=False)
    """Which call of this rank's it is, where `number` does not say it: messages of one kind follow each other."""

    def ended(self) -> "Call":
        return replace(self, over=True, waits_for=None)

    @property
    def words(self) -> str:
        number = f"call {self.number}, " if self.number else ""
        return f"{self.what} ({number}{self.group}: ranks {listed(self.ranks)})"


class Source(Protocol):
    """A group that reports its calls itself."""

    def calls(self) -> list[Call]: ...


sources: "weakref.WeakSet[Any]" = weakref.WeakSet()
LONG = "long: "
"""Groups whose description begins so may wait for long: for a disk, or a download."""


def called(description: str) -> str:
    """A group in the words of the layout, which describes its groups by their axes."""
    return {"default_pg": "world", "": "world"}.get(description, description.removeprefix("mesh_"))


_making_groups = threading.RLock()
"""Torch changes its tables of groups without a lock: a thread that reads them while a group is being made fails."""


def record_calls() -> None:
    """Before the first group is made."""
    for name, value in RECORDED.items():
        os.environ.setdefault(name, value)
    make: Any = getattr(dist.distributed_c10d, MAKES_GROUP, None)
    if make is not None and not hasattr(make, "__wrapped__"):
        setattr(dist.distributed_c10d, MAKES_GROUP, _excluding_readers(make))


MAKES_GROUP = "_new_process_group_helper"
"""Torch's private function that makes every group."""


def _excluding_readers(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        with _making_groups:
            return make(*args, **kwargs)

    return made


def elements(shape: list[list[int]], dtypes: list[str]) -> str:
    total = sum(prod(sizes) for sizes in shape)
    kind = dtypes[0].lower() if dtypes else ""
    return f"{total:,} {TORCH_NAMES.get(kind, kind)}".rstrip()


TORCH_NAMES = {"float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32"}


RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Of gloo's groups, and of NCCL's. A torch that has neither leaves it to the stack to say it all."""


def recorded() -> list[Call]:
    """Of gloo's and NCCL's groups, by their flight recorders. While a group is being made, which waits for other ranks,
    none can be read: this rank's stack says what it is doing.
    """
    if not _making_groups.acquire(timeout=1.0):  # another reader needs less
        return []
    try:
        return _read_recorders()
    finally:
        _making_groups.release()


def _read_recorders() -> list[Call]:
    return last_of_each([entry for entries in recorders() for entry in entries], groups_by_name())


def recorders() -> list[list[dict[str, Any]]]:
    """What each flight recorder has, oldest first. To be called while no group is being made."""
    from torch._C import _distributed_c10d as c10d  # the only door to them

    dumps = [getattr(c10d, name) for name in RECORDERS if hasattr(c10d, name)]
    return [json.loads(dump(True, False)).get("entries", []) for dump in dumps]


def last_of_each(entries: list[dict[str, Any]], members: dict[str, tuple[int, ...]]) -> list[Call]:
    """Of each group, its last collective and its last message; `entries` come oldest first."""
    last = {(entry["process_group"][0], bool(entry.get("is_p2p"))): entry for entry in entries}
    return [call_of(entry, members.get(name, ()), is_message) for (name, is_message), entry in last.items()]


OPERATIONS = {"_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"}
"""As one calls them."""
MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
"""As NCCL's recorder calls it: whose, and with whom, in the group's numbering."""


def call_of(entry: dict[str, Any], ranks: tuple[int, ...], is_message: bool) -> Call:
    operation = operation_of(entry)
    other = MESSAGE.fullmatch(operation)
    waits_for = None
    if other is not None:
        peer = int(other[3])
        waits_for = ranks[peer] if peer < len(ranks) else peer
        operation = f"{other[1]} {'to' if other[1] == 'send' else 'from'} rank {waits_for}"
    what = f"{operation} of {elements(entry['input_sizes'], entry['input_dtypes'])}"
    over = bool(entry.get("retired")) or entry.get("state") == "completed"
    number = 0 if is_message else int(entry["collective_seq_id"])
    group, record = called(entry["process_group"][1]), int(entry.get("record_id", 0))
    return Call(group, ranks, number, what, over, None if over else waits_for, record if is_message else 0)


def operation_of(entry: dict[str, Any]) -> str:
    name = str(entry["profiling_name"])
    operation = name.partition(":")[2] or name
    return OPERATIONS.get(operation, operation)


def groups_by_name() -> dict[str, tuple[int, ...]]:
    """Torch's groups that this rank is in, with their ranks."""
    known = getattr(dist.distributed_c10d, "_world", None)  # private, and asked in this place alone
    names: dict[Any, str] = getattr(known, "pg_names", {})
    return {name: tuple(dist.get_process_group_ranks(group)) for group, name in names.items()}


def last_calls() -> list[Call]:
    """Of every group that this rank has called something in."""
    return [*(call for source in list(sources) for call in source.calls()), *recorded()]
