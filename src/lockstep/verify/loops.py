"""The wrappers in a plain loop, as a user writes one: what `ParallelModel` never does, and people do.

1. two backwards without zero_grad: gradients add up
2. zero_grad(set_to_none=False), an evaluation, then a step just after a forward that has no backward
3. the optimizer's whole state saved and loaded, where a wrapper has one to save; then one more step
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.apart import relative
from lockstep.data import Batch
from lockstep.layout import Held
from lockstep.parallel.data.wrapper import GradientWrapper
from lockstep.strategies import ParallelModel
from lockstep.verify.compare import TOLERANCE
from lockstep.verify.reference import Reference


def check_loop(strategy: ParallelModel, reference: Reference) -> list[str]:
    """What differs from a plain loop on one process, on this rank. Every rank must ask together."""
    wrapper, optimizer = strategy.engine.module, strategy.engine.optimizer
    if not isinstance(wrapper, GradientWrapper):
        return []
    scenario = reference.scenario
    plain = scenario.build(seed=0).to(strategy.world.device, reference.dtype)
    alone = reference.make_optimizer(p for p in plain.parameters() if p.requires_grad)
    loop = Loop(strategy, wrapper, plain)
    batches = [scenario.global_batch(step).to(strategy.world.device, reference.dtype) for step in range(5)]
    loop.backward(batches[0])
    loop.backward(batches[1])
    broken = loop.differ("gradient", "two backwards without zero_grad", reference)
    for one in (optimizer, alone):
        one.step()
        one.zero_grad(set_to_none=False)
    with torch.no_grad():
        wrapper.eval()
        wrapper(batches[2].share(strategy.batch_share()).inputs)
        wrapper.train()
    loop.backward(batches[3])
    broken += loop.differ("gradient", "zero_grad(set_to_none=False), and an evaluation", reference)
    loop.forward(batches[2])
    for one in (optimizer, alone):
        one.step()
        one.zero_grad()
    if hasattr(optimizer, "full_state_dict"):
        optimizer.load_state_dict(optimizer.full_state_dict())
    loop.backward(batches[4])
    for one in (optimizer, alone):
        one.step()
    strategy.settle()
    return broken + loop.differ("weight", "a plain loop", reference)


class Loop:
    """A wrapped model and a plain one, given the same batches."""

    def __init__(self, strategy: ParallelModel, wrapper: GradientWrapper, plain: nn.Module) -> None:
        self.strategy, self.wrapper, self.plain = strategy, wrapper, plain

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss of this rank's share, of which the mean over the ranks is the global batch's; loss of all of it)."""
        mine = batch.share(self.strategy.batch_share())
        outputs: Any = self.wrapper(mine.inputs)
        weight = self.strategy.layout.gradient.size / len(batch) * (0.0 if mine.filler else 1.0)
        own = F.cross_entropy(outputs, mine.targets, reduction="sum") * weight
        return own, F.cross_entropy(self.plain(batch.inputs), batch.targets)

    def backward(self, batch: Batch) -> None:
        for loss in self.forward(batch):
            loss.backward()

    def differ(self, kind: str, when: str, reference: Reference) -> list[str]:
        strategy, tolerance = self.strategy, TOLERANCE[reference.precision]
        mine: dict[str, Held] = strategy.gradients() if kind == "gradient" else strategy.held()
        for name, parameter in reversed(list(self.plain.named_parameters())):
            expected = parameter.grad if kind == "gradient" else parameter
            if expected is None or name not in mine:
                continue
            got = mine[name].tensor.detach().reshape(-1)
            wanted = mine[name].region.read(expected.detach())
            if (size := relative(got, wanted)) > tolerance:
                return [f"loop: after {when}, the {kind} of {name} differs by {size:.1e}"]
        return []
