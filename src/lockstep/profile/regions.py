"""Names in the trace: forward and backward of each block, as any strategy runs them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from lockstep.models.blocks import blocks_of


@contextmanager
def named_blocks(model: nn.Module) -> Iterator["Regions"]:
    """Inside, each block's forward and backward is a region of the profiler's trace."""
    handles: list[RemovableHandle] = []
    regions = Regions()
    for name, block in blocks_of(model):
        begin, end = partial(regions.begin_forward, name), partial(regions.end_forward, name)
        handles.append(block.register_forward_pre_hook(begin, with_kwargs=True, prepend=True))
        handles.append(block.register_forward_hook(end))
    try:
        yield regions
    finally:
        for handle in handles:
            handle.remove()


class Regions:
    """A block's backward begins with the gradient of its output, and ends with that of its input, with the beginning of
    the next block's, or with the step, whichever comes first: the first block's input may need none.
    """

    def __init__(self) -> None:
        self._forward: list[record_function] = []
        self._backward: tuple[str, record_function] | None = None

    def begin_forward(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._forward.append(record_function(f"forward of {name}"))
        self._forward[-1].__enter__()
        for tensor in differentiable((args, kwargs)):
            tensor.register_hook(lambda _: self.end_backward(name))

    def end_forward(self, name: str, _: nn.Module, args: Any, outputs: Any) -> None:
        if self._forward:
            self._forward.pop().__exit__(None, None, None)
        for tensor in differentiable(outputs):
            tensor.register_hook(lambda _: self._begin_backward(name))

    def _begin_backward(self, name: str) -> None:
        if self._backward is None or self._backward[0] != name:
            self.end_backward()
            self._backward = (name, record_function(f"backward of {name}"))
            self._backward[1].__enter__()

    def end_backward(self, name: str | None = None) -> None:
        """Of this block, if it is the one that runs; of any."""
        if self._backward is not None and name in (None, self._backward[0]):
            self._backward[1].__exit__(None, None, None)
            self._backward = None


def differentiable(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor) and value.requires_grad]
