"""The gradients that this rank's optimizer steps with, and their norm over the whole model: each element once.

Who holds what follows from the regions. Where every rank holds everything, the norm is known without a message; else
each rank adds up the squares of what it holds, divided by the number of ranks that hold the same, and the sums meet.
"""

from collections import Counter
from functools import cached_property

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_objects, all_reduce
from lockstep.layout import Region
from lockstep.layout.region import local
from lockstep.strategies.engine import Engine


class Gradients:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.layout = engine, engine.layout

    @cached_property
    def _known(self) -> tuple[dict[int, list[Tensor]], bool]:
        """(number of ranks that hold the same region -> what this rank holds of such, whether all hold everything).

        Found out once, by all ranks together.
        """
        trained = self.engine.trained()
        holders: Counter[tuple[str, Region]] = Counter()
        for theirs in all_gather_objects({name: held.region for name, held in trained.items()}, self.layout.norm):
            holders.update(theirs.items())
        by_holders: dict[int, list[Tensor]] = {}
        for name, held in trained.items():
            by_holders.setdefault(holders[name, held.region], []).append(held.parameter)
        return by_holders, all(count == self.layout.norm.size for count in holders.values())

    def tensors(self) -> list[Tensor]:
        """This rank's, as plain tensors."""
        by_holders, _ = self._known
        return [local(p.grad) for group in by_holders.values() for p in group if p.grad is not None]

    def norm(self) -> Tensor:
        """Of the whole model's gradient."""
        by_holders, everywhere = self._known
        if everywhere:
            return nn.utils.get_total_norm(self.tensors())
        squares = torch.zeros((), dtype=torch.float64, device=self.layout.world.device)
        for holders, parameters in by_holders.items():
            gradients = [local(p.grad) for p in parameters if p.grad is not None and local(p.grad).numel()]
            if gradients:
                squares += nn.utils.get_total_norm(gradients).to(squares) ** 2 / holders
        return all_reduce(squares, group=self.layout.norm, purpose="norm").sqrt()

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """As torch's clip_grad_norm_, for a norm that is known."""
        self.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))

    def scale(self, factor: Tensor) -> None:
        if gradients := self.tensors():
            torch._foreach_mul_(gradients, factor.to(gradients[0]))
