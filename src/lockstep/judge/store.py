"""The record of a run: a folder with lines of JSON from each process, and tensors by digest.

What two ranks hold alike is written once. Nothing of a tensor stays in the script's memory.
"""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Event = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """A tensor in the store."""

    digest: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, noted: list[Any] | None) -> "Stored | None":
        return None if noted is None else cls(noted[0], noted[1], tuple(noted[2]))


class Store:
    """Tensors of all runs of a judgement."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, tensor: Tensor) -> list[Any]:
        """(digest, dtype, shape), for a line of the record."""
        here = tensor.detach().to("cpu").contiguous()
        here = here.clone() if here.storage_offset() else here  # its bytes are seen as words
        data = here.reshape(-1).view(torch.uint8) if here.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")
        digest = digest_of(data)
        file = self.folder / digest
        if not file.exists() and here.numel():
            temporary = file.with_name(f"{digest}.{os.getpid()}")
            with temporary.open("wb") as out:
                out.write(memoryview(data.numpy()))  # type: ignore[arg-type]
            temporary.replace(file)
        return [digest, str(here.dtype).removeprefix("torch."), list(here.shape)]

    def get(self, stored: Stored) -> Tensor:
        """Read when it is looked at, by pages."""
        dtype, count = getattr(torch, stored.dtype), 1
        for size in stored.shape:
            count *= size
        if not count:
            return torch.empty(stored.shape, dtype=dtype)
        return torch.from_file(str(self.folder / stored.digest), size=count, dtype=dtype).view(stored.shape)


def digest_of(data: Tensor) -> str:
    """Of a tensor of bytes. Two sums that know nothing of each other: equal tensors have both equal, and others do not
    by accident.
    """
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    exclusive_or = int(torch.hash_tensor(words).view(torch.int64)) if words.numel() else 0
    checksum = zlib.crc32(memoryview(data.numpy()))  # type: ignore[arg-type]
    return f"{checksum:08x}{exclusive_or & (2**64 - 1):016x}{data.numel():x}"


class Recorder:
    """Of one process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._out = (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")
        self.store = Store(folder.parent / "tensors")

    def note(self, kind: str, **what: Any) -> None:
        self._out.write(json.dumps({"kind": kind, **what}, default=str) + "\n")
        self._out.flush()


@dataclass
class Process:
    """What one process has recorded."""

    rank: int
    size: int
    events: list[Event]

    @property
    def has_stepped(self) -> bool:
        return any(self.of("step"))

    def of(self, kind: str) -> Iterator[Event]:
        return (event for event in self.events if event["kind"] == kind)


def processes(folder: Path) -> list[Process]:
    """Of a run, those that train, by rank: a process that has only started others takes no step."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        events = []
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                break  # it is being written
        said = [event for event in events if "rank" in event]
        if said:
            found.append(Process(said[-1]["rank"], said[-1]["size"], events))
    stepping = {process.rank for process in found if process.has_stepped}
    trains = [process for process in found if process.has_stepped or process.rank not in stepping]
    return sorted(trains, key=lambda process: process.rank)
