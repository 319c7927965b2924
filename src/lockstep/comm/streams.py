"""On a GPU, communication runs on a separate stream, concurrently with the compute stream.

    compute         ──── mark ─── kernels ─── kernels ─── wait ───
                          ╲                              ╱
    communication          ╰──── collective ──── ended ─╯

There is one such stream for each process group: collectives of one group run in order, those of two groups need not.
We enqueue NCCL's kernels there ourselves, instead of letting NCCL use its internal stream, so that an event after
them records when they were done; an observer on a third stream could hold up the other two.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_streams: weakref.WeakKeyDictionary[dist.ProcessGroup, torch.cuda.Stream] = weakref.WeakKeyDictionary()


class StreamWork(dist.Work):
    """Done when everything enqueued on a stream so far is done; `wait` makes the current stream wait, not the host.

    Until then it keeps the tensors alive: memory that is freed could be reused by the next kernels of a stream that
    has not waited.
    """

    def __init__(self, stream: torch.cuda.Stream, holding: object) -> None:
        super().__init__()
        self.ended = stream.record_event(torch.cuda.Event(enable_timing=True))
        self._holding: object | None = holding

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self.ended)
        self._holding = None
        return True


def on_its_stream(group: dist.ProcessGroup | None, device: torch.device, communicate: Callable[[], Any]) -> StreamWork:
    """Run `communicate` on the group's stream, after everything enqueued on the current stream so far."""
    group = group or dist.group.WORLD
    assert group is not None
    if group not in _streams:
        _streams[group] = torch.cuda.Stream(device, priority=-1)  # a few small kernels, scheduled before compute's many
    stream = _streams[group]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        communicate()
    return StreamWork(stream, communicate)
