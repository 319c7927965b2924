"""Tensors that live in shared memory from the start, so that a collective on them copies nothing in or out.

All ranks of a group allocate them together; each gets its own tensor and can access all of them. What a rank would
otherwise copy to the board chunk by chunk can be read by all in place, and a result can be written to where it is
wanted.
"""

import weakref

import torch
from torch import Tensor

from lockstep.comm.shm.segment import Segment

ALIGNMENT = 128

_held = 0


def held_bytes() -> int:
    """Bytes of this rank's live shared tensors, which none of torch's allocators counts."""
    return _held


def shared_bytes(size: int, nbytes: int) -> int:
    return size * _stride(nbytes)


def _stride(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SharedTensors:
    """For each allocation, all ranks' tensors by rank. An allocation is dropped when this rank's tensor is freed."""

    def __init__(self) -> None:
        self._by_address: dict[int, list[Tensor]] = {}
        self._numbers: dict[int, int] = {}
        self._made = 0

    def add(self, segment: Segment, rank: int, size: int, length: int, dtype: torch.dtype) -> Tensor:
        global _held
        memory, nbytes = torch.frombuffer(segment.memory, dtype=torch.uint8), length * dtype.itemsize
        everyone = [memory[r * _stride(nbytes) :][:nbytes].view(dtype) for r in range(size)]
        own = everyone[rank]
        # `everyone` must not keep this rank's tensor object alive: its finalizer tells us when to drop the allocation.
        everyone[rank] = own.data
        self._by_address[own.data_ptr()] = everyone
        self._numbers[own.data_ptr()] = self._made
        self._made += 1
        _held += nbytes
        weakref.finalize(own, _forget, weakref.ref(self), own.data_ptr(), nbytes)
        return own

    def find(self, flat: Tensor, beginning: bool = False) -> list[Tensor] | None:
        """All ranks' tensors, if `flat` is one that was allocated here; or, with `beginning`, a prefix of one.

        Use `beginning` only for what starts at the same offset on every rank: the first rank's part of a
        tensor starts where the tensor does, but the other ranks' parts do not.
        """
        everyone = self._by_address.get(flat.data_ptr())
        if everyone is None or everyone[0].dtype != flat.dtype:
            return None
        if everyone[0].numel() == flat.numel():
            return everyone
        return [t[: flat.numel()] for t in everyone] if beginning and everyone[0].numel() > flat.numel() else None

    def number(self, everyone: list[Tensor], rank: int) -> int:
        """The number of the allocation, counted from the first: the same on every rank."""
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
