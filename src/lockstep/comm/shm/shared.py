"""Tensors that live in shared memory from the start, so that a collective on them copies nothing in or out.

All ranks of a group make one together; each gets its own, and sees all. What a rank would otherwise have to
show chunk by chunk on the board is then already there for all to read, and a result can be written to where it is
wanted.
"""

import weakref

import torch
from torch import Tensor

from lockstep.comm.shm.segment import Segment

ALIGNMENT = 128

_held = 0


def held_bytes() -> int:
    """Bytes of this rank's own shared tensors that are alive: no allocator of torch's counts them."""
    return _held


def shared_bytes(size: int, nbytes: int) -> int:
    return size * _stride(nbytes)


def _stride(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SharedTensors:
    """All ranks' tensors of one allocation, by rank. Forgotten when this rank's own is no longer used."""

    def __init__(self) -> None:
        self._by_address: dict[int, list[Tensor]] = {}
        self._numbers: dict[int, int] = {}
        self._made = 0

    def add(self, segment: Segment, rank: int, size: int, length: int, dtype: torch.dtype) -> Tensor:
        global _held
        memory, nbytes = torch.frombuffer(segment.memory, dtype=torch.uint8), length * dtype.itemsize
        everyone = [memory[r * _stride(nbytes) :][:nbytes].view(dtype) for r in range(size)]
        own = everyone[rank]
        # `everyone` must not keep the rank's own tensor object alive: it is by its end that we know.
        everyone[rank] = own.data
        self._by_address[own.data_ptr()] = everyone
        self._numbers[own.data_ptr()] = self._made
        self._made += 1
        _held += nbytes
        weakref.finalize(own, _forget, weakref.ref(self), own.data_ptr(), nbytes)
        return own

    def find(self, flat: Tensor, beginning: bool = False) -> list[Tensor] | None:
        """All ranks', if `flat` is a tensor made here; or the `beginning` of one.

        Only what has the same place on every rank may be looked for by its beginning: the first rank's part of a
        tensor begins where the tensor does, and the other ranks' parts do not.
        """
        everyone = self._by_address.get(flat.data_ptr())
        if everyone is None or everyone[0].dtype != flat.dtype:
            return None
        if everyone[0].numel() == flat.numel():
            return everyone
        return [t[: flat.numel()] for t in everyone] if beginning and everyone[0].numel() > flat.numel() else None

    def number(self, everyone: list[Tensor], rank: int) -> int:
        """Which one, counted from the first: the same on every rank."""
        return self._numbers.get(everyone[rank].data_ptr(), -1)

    def __bool__(self) -> bool:
        return bool(self._by_address)

    def forget(self, address: int) -> None:
        self._by_address.pop(address, None)
        self._numbers.pop(address, None)


def _forget(shared: "weakref.ref[SharedTensors]", address: int, nbytes: int) -> None:
    global _held
    _held -= nbytes
    tensors = shared()
    if tensors is not None:
        tensors.forget(address)
