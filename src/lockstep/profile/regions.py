"""Names in the trace: forward and backward of each block, as any strategy runs them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from lockstep.parallel.blocks import blocks_of


@contextmanager
def named_blocks(model: nn.Module) -> Iterator[None]:
    """Inside, each block's forward and backward is a region of the profiler's trace."""
    handles: list[RemovableHandle] = []
    for name, block in blocks_of(model):
        region = Region(name)
        handles.append(block.register_forward_pre_hook(region.begin_forward, with_kwargs=True, prepend=True))
        handles.append(block.register_forward_hook(region.end_forward))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Region:
    """One block. Its backward begins with the gradient of its output and ends with that of its input."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._forward: list[record_function] = []
        self._backward: record_function | None = None

    def begin_forward(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._forward.append(record_function(f"forward of {self.name}"))
        self._forward[-1].__enter__()
        for tensor in differentiable((args, kwargs)):
            tensor.register_hook(lambda _: self._end_backward())

    def end_forward(self, _: nn.Module, args: Any, outputs: Any) -> None:
        if self._forward:
            self._forward.pop().__exit__(None, None, None)
        for tensor in differentiable(outputs):
            tensor.register_hook(lambda _: self._begin_backward())

    def _begin_backward(self) -> None:
        if self._backward is None:
            self._backward = record_function(f"backward of {self.name}")
            self._backward.__enter__()

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._backward.__exit__(None, None, None)
            self._backward = None


def differentiable(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor) and value.requires_grad]
