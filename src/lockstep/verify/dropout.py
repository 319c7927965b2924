"""Random numbers follow the layout: the same where tensors are whole, others where they are cut or samples differ.

Nothing can be held against one process here, but ranks can be held against each other:

- a dropout of something whole drops the same elements on all ranks of tp, other ones on ranks that read other samples
- inside a region that tp cuts, ranks draw from streams of their own
- recomputed activations drop what forward dropped: gradients are those of a step that recomputes nothing
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_objects
from lockstep.config import Parallel
from lockstep.layout import World
from lockstep.parallel.tensor.parallel_linear import RowParallelLinear
from lockstep.strategies import STRATEGIES, ParallelModel
from lockstep.strategies.table import Table
from lockstep.verify.compare import spread
from lockstep.verify.reference import Reference
from lockstep.verify.scenarios import Scenario


class Numbers:
    """Inside, what dropouts drop is written down, and the seed that is in force where a cut region ends."""

    def __init__(self, model: nn.Module) -> None:
        self.dropped: list[int] = []
        self.seeds: list[int] = []
        self._hooks: list[Any] = []
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                self._hooks.append(part.register_forward_hook(self._note))
            elif isinstance(part, RowParallelLinear):
                self._hooks.append(part.register_forward_pre_hook(self._note_seed, prepend=True))

    def _note(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self.dropped.append(hash(tuple((output == 0).flatten().tolist())))

    def _note_seed(self, *_: Any) -> None:
        self.seeds.append(torch.initial_seed())

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def check_dropout(world: World, scenario: Scenario, parallel: Parallel, table: Table = STRATEGIES) -> list[str]:
    """What is wrong with this rank's random numbers. Every rank must ask together."""
    found: dict[str, dict[str, Tensor]] = {}
    broken: list[str] = []
    for recompute in ("none", "full"):
        reference = Reference(world, replace(scenario, recompute=recompute), 1, "fp64", "sgd")
        strategy = spread(reference, parallel, table)
        torch.manual_seed(strategy.layout.seed(17))
        numbers = Numbers(strategy.model)
        strategy.step(scenario.global_batch(0).share(strategy.batch_share()))
        numbers.remove()
        if recompute == "none":
            broken = _ranks_agree(strategy, numbers)
        found[recompute] = {name: held.tensor.clone() for name, held in strategy.gradients().items()}
    for name, gradient in found["none"].items():
        if not torch.allclose(found["full"][name], gradient, rtol=1e-9, atol=1e-12):
            broken.append(f"dropout: with recomputation the gradient of {name} is another one")
            break
    return broken


def _ranks_agree(strategy: ParallelModel, numbers: Numbers) -> list[str]:
    layout = strategy.layout
    batch, tp = layout.group("replicate", "shard"), layout.group("tp")
    broken = []
    if tp.size > 1 and "tp" not in strategy.parallel.native:
        alike = len(set(map(tuple, all_gather_objects(numbers.dropped, tp)))) == 1
        if alike == strategy.parallel.sequence:
            said = "the same elements of different positions" if alike else "other elements of the same activations"
            broken.append(f"dropout: ranks of tp drop {said}")
        inside: list[list[int]] = all_gather_objects(numbers.seeds, tp)
        if any(len(set(seeds)) < tp.size for seeds in zip(*inside, strict=True)):
            broken.append("dropout: ranks of tp draw the same numbers inside a region that is cut")
        states = all_gather_objects(hash(tuple(torch.get_rng_state().tolist())), tp)
        if len(set(states)) > 1:
            broken.append("dropout: the stream of random numbers that ranks of tp share has parted")
    if batch.size > 1 and numbers.dropped and layout.degrees.pp == 1:
        theirs = {tuple(dropped) for dropped in all_gather_objects(numbers.dropped, batch)}
        if len(theirs) < batch.size:
            broken.append("dropout: ranks that read other samples drop the same elements")
    return broken
