"""With what a model enters its forward passes: buffers that ranks share, and the mode that it is in."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from torch import nn

from lockstep.comm.collectives import all_gather_objects
from lockstep.layout import Group
from lockstep.strategies import ParallelModel


class Entry:
    """What a model enters its forward passes with: buffers that each rank changes, and the mode that it is in."""

    def __init__(self, strategy: ParallelModel, names: tuple[str, ...]) -> None:
        self.model, self.names = strategy.model, names
        self.values: list[dict[str, list[float]]] = []
        self.trained = False
        """The last forward was one of training."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.trained = False
        hook = self.model.register_forward_pre_hook(self._enter)
        try:
            yield
        finally:
            hook.remove()

    def _enter(self, module: nn.Module, _: object) -> None:
        self.trained = module.training
        buffers = dict(module.named_buffers()) if self.names else {}
        self.values.append({name: buffers[name].flatten().tolist() for name in self.names})

    def differences(self, group: Group) -> dict[tuple[str, str], float]:
        """Of the ranks that hold copies: they must begin every forward with the same. Every rank must ask together."""
        values, self.values = self.values, []
        if not self.names:
            return {}
        everyone = all_gather_objects(values, group)
        differ = [
            name for name in self.names if any([v[name] for v in t] != [v[name] for v in values] for t in everyone)
        ]
        return {("weights", f"buffer {name}, with which ranks begin a forward,"): inf for name in differ}


def idle(strategy: ParallelModel, meant: set[str]) -> list[str]:
    """Modules that are not in training mode, though training goes on; but for those that are `meant` to be."""
    found = [name for name, module in strategy.model.named_modules() if not module.training]
    return [name for name in found if name not in meant][:1]
