"""Copies of a state on the host, which training cannot change any more: how an asynchronous save begins.

On a CPU training waits for the copy. On a GPU it does not:

1. the copies of weights and moments are issued on a stream of their own, into pinned memory that is kept for the next
   save; what forward and backward change (buffers, random numbers, error feedback) is copied on the compute stream
2. the host goes on at once, and the next forward and backward run beside the copies
3. the optimizer is the first to write to what is copied: its step waits for the copies, on the GPU (`Worker`)
4. whoever writes the files waits for the copies on the host (`Snapshot.wait`)
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.layout import Held


@dataclass
class Snapshot:
    """A state being copied."""

    state: dict[str, Any]
    copied: torch.cuda.Event | None = None
    """None: it has been."""
    device: torch.device | None = None

    def wait(self) -> dict[str, Any]:
        """On the host, in a thread that knows no device yet."""
        if self.copied is not None:
            torch.cuda.set_device(self.device)
            self.copied.synchronize()
        return self.state


class Snapshots:
    """Takes them, one after the other: the memory of one is the next one's, so its files must have been written."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._can_pin = True

    def take(self, state: dict[str, Any], in_the_background: bool, forward_writes: Collection[str] = ()) -> Snapshot:
        """`in_the_background`: where it can be; the caller has the optimizer wait for it. `forward_writes`: names of
        buffers.
        """
        in_the_background &= self._can_pin and torch.cuda.is_available() and torch.cuda.is_initialized()
        if not in_the_background:
            return Snapshot({name: self._copied(name, value, False) for name, value in state.items()})
        compute = torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()
        now = {n for n in state if n in forward_writes or not n.startswith(("model.", "optimizer."))}
        copies = {name: self._copied(name, state[name], True) for name in now}
        self._stream.wait_stream(compute)  # behind the step that wrote the rest, and the copies above
        with torch.cuda.stream(self._stream):
            copies |= {name: self._copied(name, value, True) for name, value in state.items() if name not in now}
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return Snapshot(copies, event, compute.device)

    def _copied(self, name: str, value: Any, pinned: bool) -> Any:
        if isinstance(value, Held):
            return replace(value, parameter=self._on_host(name, value.tensor, pinned))
        if isinstance(value, Tensor):
            return self._on_host(name, value.detach(), pinned)
        if isinstance(value, dict):
            return {key: self._copied(f"{name}.{key}", v, pinned) for key, v in value.items()}
        if isinstance(value, list):
            return [self._copied(f"{name}.{i}", v, pinned) for i, v in enumerate(value)]
        return value

    def _on_host(self, name: str, tensor: Tensor, pinned: bool) -> Tensor:
        """On the current stream; into pinned memory the host does not wait for it."""
        if tensor.device.type != "cuda" or not pinned:
            return tensor.to("cpu", copy=True)
        target = self._pinned_like(name, tensor)
        if target is None:
            return tensor.to("cpu", copy=True)
        target.copy_(tensor, non_blocking=True)
        tensor.record_stream(torch.cuda.current_stream())
        return target

    def _pinned_like(self, name: str, tensor: Tensor) -> Tensor | None:
        """None where the host gives no more of it: from then on training waits for the copies."""
        found = self._pinned.get(name)
        if found is not None and (found.shape, found.dtype) == (tensor.shape, tensor.dtype):
            return found
        if not self._can_pin:
            return None
        try:
            self._pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        except RuntimeError:
            self._can_pin = False
            self._pinned.clear()
            return None
        return self._pinned[name]
