"""A model that is built without memory, and whose tensors are then made one by one.

A model that no rank could hold must be built without being held. On PyTorch's meta device a module's constructor runs
as it is, and its tensors have shapes but no memory. We note every operation that the constructor performs on them, and
play them back on real tensors: in the same order, so that the random numbers are the same as if the model had been
built at once. A tensor that nothing touches any more is finished: it is handed out, and its memory is released.

Most tensors are written several times (PyTorch's layers draw weights that the model then draws anew). What the next
operation overwrites is not kept in between, so at any time only what somebody still reads is in memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

OVERWRITES = ("uniform_", "normal_", "zero_", "fill_", "bernoulli_", "exponential_")
"""Write every element of their first argument, and read none."""


@dataclass(frozen=True, eq=False)
class View:
    """A tensor of the meta device, as it was when it was noted: whoever shards the module will change the tensor."""

    storage: torch.UntypedStorage
    """Kept, as its address is its name."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        storage = tensor.untyped_storage()
        return cls(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @property
    def name(self) -> int:
        return self.storage._cdata

    @property
    def covers_storage(self) -> bool:
        return self.shape.numel() * self.dtype.itemsize == self.storage.nbytes()

    def real(self, memory: dict[int, Tensor]) -> Tensor:
        """The same, of the memory that the storage has by now."""
        return memory[self.name].view(self.dtype).as_strided(self.shape, self.stride, self.offset)


@dataclass
class Operation:
    """What the constructor did."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    touched: dict[int, None]
    """Storages."""
    overwritten: int | None
    """The storage that it writes all of, reading nothing."""


@dataclass
class Seed:
    """From here on, random numbers are of this seed."""

    seed: int


class Tape(TorchDispatchMode):
    """Notes operations on tensors that are on the meta device because of us, not because the model put them there."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Operation | Seed] = []
        self.asked_for_meta = False
        """By the model itself, in the call that is under way."""
        self._ours: set[int] = set()

    def is_ours(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._ours

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        noted_args, noted_kwargs, noted_result = tree_map(_noted, (args, kwargs or {}, result))
        inputs = [v.name for v in tree_flatten((noted_args, noted_kwargs))[0] if isinstance(v, View)]
        outputs = [v.name for v in tree_flatten(noted_result)[0] if isinstance(v, View)]
        ours = self._ours.issuperset(inputs) if inputs else bool(outputs) and not self.asked_for_meta
        if ours:
            self._ours.update(outputs)
            first: Any = noted_args[0] if noted_args else None
            writes = function.overloadpacket.__name__ in OVERWRITES and isinstance(first, View)
            overwritten = first.name if writes and first.covers_storage else None
            touched = dict.fromkeys([*inputs, *outputs])  # in one order on every rank
            self.notes.append(Operation(function, noted_args, noted_kwargs, noted_result, touched, overwritten))
        return result


class MetaAskedFor(TorchFunctionMode):
    """Sees calls before `torch.device("meta")` gives them their device: whoever names it in person means it."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == torch.Tensor.is_meta.__get__ and self.tape.is_ours(args[0]):  # type: ignore[attr-defined]
            return False  # PyTorch's initializers leave out what they would do
        device = (kwargs or {}).get("device")
        before, asked = self.tape.asked_for_meta, device is not None and torch.device(device).type == "meta"
        self.tape.asked_for_meta = asked
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.tape.asked_for_meta = before


def _noted(value: Any) -> Any:
    return View.of(value) if isinstance(value, Tensor) and value.device.type == "meta" else value


_recording: Tape | None = None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of this seed inside; outside they go on as if nothing had been drawn."""
    if _recording is not None:
        _recording.notes.append(Seed(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Deferred:
    """What `build()` builds, at once or without memory."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        """`build` draws random numbers inside `seeded` only, and makes tensors on the default device."""
        self.build = build

    def on_meta(self) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
        """The module on the meta device, and (name, whole tensor) of each of its parameters and buffers, on the CPU."""
        global _recording
        tape = Tape()
        with torch.device("meta"), MetaAskedFor(tape), tape:
            _recording = tape
            try:
                module = self.build()
            finally:
                _recording = None
        return module, play(tape, _places(module))


def _places(module: nn.Module) -> dict[int, list[tuple[str, View]]]:
    """Storage -> the named tensors that lie in it."""
    places: dict[int, list[tuple[str, View]]] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        view = View.of(tensor)
        places.setdefault(view.name, []).append((name, view))
    return places


@torch.no_grad()
def play(tape: Tape, places: dict[int, list[tuple[str, View]]]) -> Iterator[tuple[str, Tensor]]:
    """Perform what was noted, and hand out what is finished."""
    following = _following_touches(tape.notes)
    memory: dict[int, Tensor] = {}
    state = torch.get_rng_state()
    for index, note in enumerate(tape.notes):
        with torch.random.fork_rng(devices=[]):  # whoever is handed a tensor may draw numbers of its own
            if isinstance(note, Seed):
                torch.manual_seed(note.seed)
            else:
                torch.set_rng_state(state)
                _perform(note, memory)
            state = torch.get_rng_state()
        for storage in note.touched if isinstance(note, Operation) else ():
            later = following[index].get(storage)
            if later is None:
                for name, view in places.get(storage, []):
                    yield name, view.real(memory)
            if later is None or _overwrites(tape.notes[later], storage):
                memory.pop(storage, None)


def _following_touches(notes: list[Operation | Seed]) -> list[dict[int, int]]:
    """Of each note: the next one that touches each of its storages, if there is one."""
    following: list[dict[int, int]] = [{} for _ in notes]
    last: dict[int, int] = {}
    for index in range(len(notes) - 1, -1, -1):
        note = notes[index]
        if isinstance(note, Operation):
            following[index] = {storage: last[storage] for storage in note.touched if storage in last}
            last.update(dict.fromkeys(note.touched, index))
    return following


def _overwrites(note: Operation | Seed, storage: int) -> bool:
    return isinstance(note, Operation) and note.overwritten == storage


def _perform(note: Operation, memory: dict[int, Tensor]) -> None:
    if note.overwritten is not None and note.overwritten not in memory:
        memory[note.overwritten] = torch.empty(note.args[0].storage.nbytes(), dtype=torch.uint8)
    args, kwargs = tree_map(lambda value: _real(value, memory), (note.args, note.kwargs))
    result = note.function(*args, **kwargs)
    for noted, real in zip(tree_flatten(note.result)[0], tree_flatten(result)[0], strict=True):
        if isinstance(noted, View) and noted.name not in memory:
            if real.stride() == noted.stride:
                memory[noted.name] = torch.empty(0, dtype=torch.uint8).set_(real.untyped_storage())
            else:  # LAPACK gives its results column by column, which the meta device does not know
                memory[noted.name] = torch.empty(noted.storage.nbytes(), dtype=torch.uint8)
                noted.real(memory).copy_(real)


def _real(value: Any, memory: dict[int, Tensor]) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.real(memory) if isinstance(value, View) else value
