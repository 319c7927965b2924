"""The pieces of all ranks, put together: of a run, at a step, everything by name."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from lockstep.judge.runs import Run, unseen
from lockstep.judge.store import Event, Process, Store, Stored
from lockstep.layout.region import Box, Region, uncovered

Place = tuple[int, int]
"""(optimizer, its step)"""


NAMED = {"weights", "buffers", "pieces", "gradient_pieces", "before", "gradients", "trained"}
"""What an event has by names of parameters or buffers."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor."""

    rank: int
    boxes: tuple[Box, ...] | None
    shape: tuple[int, ...] | None
    stored: Stored | None
    """None: the rank has no gradient of it."""

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of the whole tensor, in one row."""
        if self.boxes is None:
            return whole.reshape(-1)
        return Region(tuple(whole.shape), self.boxes).read(whole)


class Tensors:
    """Those of one kind at one step of a run: gradients, for example."""

    def __init__(self, store: Store, parts: dict[str, list[Part]]) -> None:
        self.store, self.parts = store, parts

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def read(self, part: Part) -> Tensor:
        """Flattened, in double precision."""
        assert part.stored is not None
        return exact(self.store.get(part.stored)).reshape(-1)

    def whole(self, name: str) -> Tensor:
        """Put together; zeros where no rank has one."""
        found = self.whole_if(name)
        if found is None:
            shape = next((part.shape for part in self.parts[name] if part.shape is not None), None)
            found = torch.zeros(shape or extent(self.parts[name]) or (), dtype=torch.float64)
        return found

    def whole_if(self, name: str) -> Tensor | None:
        """None where some elements are on no rank, or no rank has a gradient."""
        parts = [part for part in self.parts.get(name, []) if part.stored is not None]
        for part in parts:
            assert part.stored is not None
            if part.boxes is None:
                return exact(self.store.get(part.stored))
        shape = next((part.shape for part in parts if part.shape is not None), None) or extent(parts)
        if shape is None:
            return None
        whole = torch.full(shape, torch.nan, dtype=torch.float64)
        seen = torch.zeros(shape, dtype=torch.bool)
        for part in parts:
            held = Region(shape, part.boxes or ())
            held.write(whole, self.read(part))
            for box in held.boxes:
                seen[box.slices] = True
        return whole if bool(seen.all()) else None

    def copies(self, name: str) -> Iterator[list[Part]]:
        """The ranks that hold the same elements of it."""
        same: dict[Any, list[Part]] = {}
        for part in self.parts[name]:
            same.setdefault(part.boxes, []).append(part)
        return iter(same.values())

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """The ranks that have the same bits."""
        same: dict[str | None, list[int]] = {}
        for rank, digest in self.digests(name).items():
            same.setdefault(digest, []).append(rank)
        return [tuple(ranks) for ranks in same.values()]

    def digests(self, name: str) -> dict[int, str | None]:
        """Rank -> digest of what it holds."""
        return {part.rank: part.stored.digest if part.stored else None for part in self.parts[name]}


def exact(tensor: Tensor) -> Tensor:
    """In double precision, also both parts of complex numbers."""
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()


def extent(parts: list[Part]) -> tuple[int, ...] | None:
    """Of a tensor of which only boxes are known."""
    boxes = [box for part in parts for box in part.boxes or ()]
    if not boxes:
        return None
    ends = [[offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)] for box in boxes]
    return tuple(max(column) for column in zip(*ends, strict=True))


class Wholes(Mapping[str, Tensor]):
    """Put together one at a time, when they are looked at."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors.whole(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors.parts)


class Side:
    """A run, as it is compared."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.store = Store(run.folder.parent / "tensors")
        self.processes: list[Process] = run.processes

    @property
    def ranks(self) -> int:
        return self.processes[0].size if self.processes else 0

    @cached_property
    def events(self) -> dict[Place, dict[int, Event]]:
        """(optimizer, step) -> rank -> what it has recorded, in the order of the first rank."""
        found: dict[Place, dict[int, Event]] = {}
        for process in self.processes:
            for event in process.of("step"):
                found.setdefault((event["optimizer"], event["step"]), {})[process.rank] = event
        return found

    def complete(self, place: Place) -> bool:
        return len(self.events.get(place, {})) == self.ranks

    def losses(self, place: Place) -> dict[int, float]:
        """Rank -> what backward was called on, over the micro-batches; ranks without one are left out."""
        return {rank: sum(event["losses"]) for rank, event in self.events[place].items() if event["losses"]}

    def loss(self, place: Place) -> float | None:
        """Of one process."""
        return next(iter(self.losses(place).values()), None)

    def norms(self, place: Place) -> dict[int, list[float]]:
        """Rank -> those by which it has clipped."""
        return {r: [norm for _, norm in event["norms"]] for r, event in self.events[place].items() if event["norms"]}

    def norm(self, place: Place) -> float | None:
        """Of one process, the last."""
        return next((norms[-1] for norms in self.norms(place).values()), None)

    def rows(self, place: Place) -> dict[int, int]:
        """Rank -> how many it has read."""
        return {
            rank: sum(tensor["shape"][0] for given in event["inputs"] for tensor in given[:1])
            for rank, event in self.events[place].items()
        }

    def micro_batches(self, place: Place) -> int:
        return max((len(event["losses"]) for event in self.events[place].values()), default=1) or 1

    def tensors(self, place: Place, kind: str) -> Tensors:
        """`kind`: before, gradients, weights or buffers."""
        return self._tensors(self.events[place], kind)

    def start(self) -> Tensors:
        """Weights before anything was done."""
        first = {process.rank: _together(process) for process in self.processes}
        return self._tensors({rank: event for rank, event in first.items() if event}, "weights")

    def _tensors(self, events: dict[int, Event], kind: str) -> Tensors:
        parts: dict[str, list[Part]] = {}
        for rank, event in sorted(events.items()):
            pieces = event.get("gradient_pieces" if kind == "gradients" else "pieces", {})
            for name, noted in event[kind].items():
                parts.setdefault(name, []).append(_part(rank, pieces.get(name), noted))
        return Tensors(self.store, parts)

    def names(self) -> set[str]:
        """Of all parameters that any rank has."""
        return {name for process in self.processes for event in process.of("start") for name in event["weights"]}

    def take_off(self, prefix: str) -> None:
        """From all names: the other side's model is not in a module of the script's own."""
        for process in self.processes:
            for event in process.events:
                for key in NAMED & event.keys():
                    event[key] = {name.removeprefix(prefix): value for name, value in event[key].items()}
                if "batch_norms" in event:
                    event["batch_norms"] = [name.removeprefix(prefix) for name in event["batch_norms"]]

    def facts(self, key: str) -> list[Any]:
        """Of all ranks' models at the start."""
        return [event[key] for process in self.processes for event in process.of("start")]

    def cannot(self) -> str | None:
        """What a watcher could not see."""
        twice = [rank for rank, count in Counter(p.rank for p in self.processes if p.has_stepped).items() if count > 1]
        if twice:
            return f"several processes have trained as rank {twice[0]}: was one started again, or a group made late?"
        return unseen(self.processes)


def align(one: Side, other: Side) -> None:
    """Take off what one side's names all begin with, where it makes them the other's."""
    for longer, shorter in ((one, other), (other, one)):
        names, wanted = longer.names(), shorter.names()
        first = next(iter(sorted(names)), "")
        for name in wanted:
            prefix = first.removesuffix(name)
            if prefix.endswith(".") and names == {prefix + name for name in wanted}:
                longer.take_off(prefix)
                return


def _part(rank: int, piece: dict[str, Any] | None, noted: list[Any] | None) -> Part:
    stored = Stored.of(noted)
    if piece is None:
        return Part(rank, None, stored.shape if stored else None, stored)
    boxes = piece["boxes"]
    made = None if boxes is None else tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes)
    shape = piece["shape"]
    return Part(rank, made, None if shape is None else tuple(shape), stored)


def _together(process: Process) -> Event:
    """Of all its models."""
    found: Event = {}
    for event in process.of("start"):
        for key in ("weights", "buffers", "pieces"):
            found.setdefault(key, {}).update(event[key])
    return found


def disagreeing(tensors: Tensors) -> dict[str, list[int]]:
    """Name -> ranks whose copy is not that of the first rank that has it."""
    found: dict[str, list[int]] = {}
    for name in tensors:
        for copies in tensors.copies(name):
            first = copies[0].stored
            ranks = [part.rank for part in copies if part.stored != first]
            if ranks:
                found[name] = ranks
    return found


def same_digests(mine: list[Part], theirs: list[Part]) -> bool:
    """All have the one whole tensor."""
    return len({part.stored for part in [*mine, *theirs]}) == 1


def unfitting(parts: list[Part], whole: Tensor) -> str | None:
    """What is wrong with pieces that cannot be those of the whole tensor."""
    shape = tuple(whole.shape)
    for part in parts:
        mine = part.stored.shape if part.stored else ()
        if any(outside(box, shape) for box in part.boxes or ()):
            return f"has a box on rank {part.rank} that is outside the reference's {shape}"
        if part.shape not in (None, shape) or prod(mine) != part.of(whole).numel():
            return f"is {tuple(mine)} on rank {part.rank}, and {shape} in the reference"
    if all(part.boxes is not None for part in parts):
        missing = uncovered((Region(shape, part.boxes or ()) for part in parts), shape)
        if missing:
            return f"has {missing} of {whole.numel()} elements on no rank"
    return None


def outside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.sizes) != len(shape) or any(
        offset < 0 or offset + size > whole for offset, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
    )
