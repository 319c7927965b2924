"""The gradients that this rank's optimizer steps with, and their norm over the whole model: each element once.

Who holds what follows from the regions. Where every rank holds everything, the norm is known without a message. Else
the first rank that holds an element answers for it: it adds up the squares of those, and the sums meet.
"""

from functools import cached_property

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_objects, all_reduce
from lockstep.layout import Box, Held
from lockstep.layout.region import local
from lockstep.strategies.engine import Engine


class Gradients:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.layout = engine, engine.layout

    @cached_property
    def _known(self) -> tuple[list[Tensor], list[tuple[Held, tuple[Box, ...]]], bool]:
        """(what this rank trains; of what it answers for, the boxes; whether all hold everything).

        Found out once, by all ranks together.
        """
        trained, group = self.engine.trained(), self.layout.norm
        everyone = all_gather_objects({name: held.region for name, held in trained.items()}, group)
        before = everyone[: group.rank]
        answers = {n: h.region.minus(t[n] for t in before if n in t) for n, h in trained.items()}
        names = {name for theirs in everyone for name in theirs}
        everywhere = all(name in t and t[name].is_whole for name in names for t in everyone)
        return (
            [held.parameter for held in trained.values()],
            [(trained[name], boxes) for name, boxes in answers.items() if boxes],
            everywhere,
        )

    def tensors(self) -> list[Tensor]:
        """This rank's, as plain tensors."""
        return [local(p.grad) for p in self._known[0] if p.grad is not None]

    def norm(self) -> Tensor:
        """Of the whole model's gradient."""
        _, answers, everywhere = self._known
        if everywhere:
            return nn.utils.get_total_norm(self.tensors())
        squares = torch.zeros((), dtype=torch.float64, device=self.layout.world.device)
        if gradients := [part for held, boxes in answers for part in gradient_parts(held, boxes)]:
            squares += nn.utils.get_total_norm(gradients).to(squares) ** 2
        return all_reduce(squares, group=self.layout.norm, purpose="norm").sqrt()

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """As torch's clip_grad_norm_, for a norm that is known."""
        self.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))

    def scale(self, factor: Tensor) -> None:
        if gradients := self.tensors():
            torch._foreach_mul_(gradients, factor.to(gradients[0]))


def gradient_parts(held: Held, boxes: tuple[Box, ...]) -> list[Tensor]:
    """These boxes of a parameter's gradient, if it has one."""
    if held.parameter.grad is None:
        return []
    gradient = local(held.parameter.grad)
    if boxes == held.region.boxes:
        return [gradient]
    return [held.region.view(gradient, box) for box in boxes]
