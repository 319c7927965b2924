"""Copies of a state on the host, which training cannot change any more: how an asynchronous save begins.

On a CPU training waits for the copy. On a GPU it does not:

1. the copies of weights and moments are issued on a stream of their own, into pinned memory that is kept for the next
   save; anything else that a state has (random numbers, error feedback), which backward may change, on the stream that
   computes
2. the host goes on at once, and the next forward and backward run beside the copies
3. the optimizer is the first to write to what is copied: its step waits for the copies, on the GPU (`Worker`)
4. whoever writes the files waits for the copies on the host (`Snapshot.wait`)
"""

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

    def wait(self) -> dict[str, Any]:
        """On the host."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.state


class Snapshots:
    """Takes them, one after the other: the memory of one is the next one's, so its files must have been written."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def take(self, state: dict[str, Any], in_the_background: bool) -> Snapshot:
        """`in_the_background`: where it can be; the caller has the optimizer wait for it."""
        copies = {name: self._copied(name, value, in_the_background) for name, value in state.items()}
        event = None
        if in_the_background and torch.cuda.is_available() and torch.cuda.is_initialized():
            compute = torch.cuda.current_stream()
            if self._stream is not None:
                self._stream.wait_stream(compute)  # behind what was copied there
            event = torch.cuda.Event()
            event.record(self._stream or compute)
        return Snapshot(copies, event)

    def _copied(self, name: str, value: Any, in_the_background: bool) -> Any:
        if isinstance(value, Held):
            return replace(value, parameter=self._on_host(name, value.tensor, in_the_background, beside=True))
        if isinstance(value, Tensor):
            of_optimizer = name.startswith("optimizer.")
            return self._on_host(name, value.detach(), in_the_background, beside=of_optimizer)
        if isinstance(value, dict):
            return {key: self._copied(f"{name}.{key}", v, in_the_background) for key, v in value.items()}
        if isinstance(value, list):
            return [self._copied(f"{name}.{i}", v, in_the_background) for i, v in enumerate(value)]
        return value

    def _on_host(self, name: str, tensor: Tensor, in_the_background: bool, beside: bool) -> Tensor:
        """`beside`: only the optimizer writes to it."""
        if tensor.device.type != "cuda" or not in_the_background:
            return tensor.to("cpu", copy=True)
        pinned = self._pinned.get(name)
        if pinned is None or (pinned.shape, pinned.dtype) != (tensor.shape, tensor.dtype):
            pinned = self._pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if not beside:
            return pinned.copy_(tensor, non_blocking=True)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # behind the step that wrote it
        with torch.cuda.stream(self._stream):
            pinned.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return pinned
