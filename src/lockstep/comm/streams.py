"""On a GPU, communication goes onto a stream of its own, beside the one that computes.

    compute         ──── mark ─── kernels ─── kernels ─── wait ───
                          ╲                              ╱
    communication          ╰──── collective ──── ended ─╯

There is one such stream for each group of ranks: collectives of a group run one after the other, those of two groups
need not. We put NCCL's kernels there ourselves, rather than have it use a stream of its own, so that an event behind
them records when they were done; an observer on a third stream could hold up the other two.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_streams: weakref.WeakKeyDictionary[dist.ProcessGroup, torch.cuda.Stream] = weakref.WeakKeyDictionary()


class StreamWork(dist.Work):
    """Done when what was put on a stream up to now is; waiting makes the current stream wait, not the host.

    Until then it keeps what holds the tensors: memory that is freed may be given to the next kernels of a stream that
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
    """Have it done on the group's stream, when what the current one has been given up to now is done."""
    group = group or dist.group.WORLD
    assert group is not None
    if group not in _streams:
        _streams[group] = torch.cuda.Stream(device, priority=-1)  # a few small programs, let in before compute's many
    stream = _streams[group]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        communicate()
    return StreamWork(stream, communicate)
