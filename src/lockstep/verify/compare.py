"""A strategy and one process, step by step on the same global batches."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_objects
from lockstep.config import Parallel
from lockstep.data import IGNORED, Batch
from lockstep.models.loss import loss_for
from lockstep.strategies import StepOptions, Strategy
from lockstep.training.optimizer import optimizer_factory
from lockstep.verify.scenarios import Scenario
from lockstep.world import World

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}


@dataclass
class Difference:
    """The first place where a rank left the reference."""

    step: int
    """0: before the first."""
    rank: int
    what: str
    size: float

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step else "before the first step"
        return f"{when}, {self.what} differs by {self.size:.1e} on rank {self.rank}"


@dataclass
class Comparison:
    """How far one strategy was from one process, over all steps and ranks."""

    loss: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0
    first: Difference | None = None


def relative(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the expected tensor's norm where that exceeds 1. NaN counts as infinite."""
    difference = float((got - expected).abs().max()) if expected.numel() else 0.0
    return _finite(difference / max(1.0, float(expected.norm())))


@dataclass
class Moment:
    """Where training stands after one step."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class Reference:
    """One process on the whole global batches of a scenario, computed once and held against every strategy.

    Plain PyTorch, with nothing of `strategies` in it: the mean loss, one backward, one clip, one optimizer step. A
    model too large to remember at every step is trained anew beside each strategy.
    """

    MEMORY = 256 * 1024 * 1024

    def __init__(self, world: World, scenario: Scenario, steps: int, precision: str, optimizer: str) -> None:
        self.world, self.scenario, self.precision = world, scenario, precision
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        self.make_optimizer = optimizer_factory(scenario.train(optimizer))
        self._restart()
        model_bytes = sum(p.nbytes for p in self._model.parameters())
        self._remembers = 2 * steps * model_bytes <= self.MEMORY
        self._moments: list[Moment] = []
        self.initial = self._weights()

    def _restart(self) -> None:
        self._model = self.scenario.build(seed=0, plain=True).to(self.world.device, self.dtype)
        self._optimizer = self.make_optimizer(p for p in self._model.parameters() if p.requires_grad)

    def after(self, step: int) -> Moment:
        """The reference after `step`; steps must be asked for in order, from 0 again for each strategy."""
        if step < len(self._moments):
            return self._moments[step]
        if step == 0 and not self._remembers:
            self._restart()
        moment = self._take(self.scenario.global_batch(step).to(self.world.device, self.dtype))
        if self._remembers:
            self._moments.append(moment)
        return moment

    def _take(self, batch: Batch) -> Moment:
        self._optimizer.zero_grad()
        outputs, targets = self._model(batch.inputs), batch.targets
        if self.scenario.spec.kind == "regression":
            loss = F.mse_loss(outputs, targets)
        else:
            loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        if self.scenario.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self.scenario.clip_norm)
        named = self._model.named_parameters()
        gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        self._optimizer.step()
        return Moment(loss.item(), gradients, self._weights())

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}


def compare(
    reference: Reference, strategy_class: type[Strategy], parallel: Parallel, steps: int
) -> tuple[Comparison, Strategy]:
    """Run a strategy beside the reference. Returns the worst differences and the strategy, as it is after the last."""
    world, scenario = reference.world, reference.scenario
    options = StepOptions(loss_for(scenario.spec.kind), scenario.accumulation, scenario.clip_norm, reference.precision)
    strategy = strategy_class(world, parallel, options)
    strategy.keep_gradients = True
    # Each rank starts from other weights: a strategy must begin by making them rank 0's.
    strategy.prepare(scenario.build(seed=world.rank), reference.make_optimizer)
    worst, tolerance = Comparison(), TOLERANCE[reference.precision]
    share = strategy.batch_share()

    def note(step: int, differences: dict[tuple[str, str], float]) -> None:
        for (kind, name), size in differences.items():
            setattr(worst, kind, max(getattr(worst, kind), size))
            if not size <= tolerance and worst.first is None:
                worst.first = Difference(step, world.rank, name, size)

    note(0, _differences("weights", strategy.full_state_dict(), reference.initial))
    for step in range(steps):
        expected, batch = reference.after(step), scenario.global_batch(step)
        got = strategy.step(batch.share(share))
        loss, _, count = got.totals.read()
        note(step + 1, {("loss", f"the number of targets ({count:.0f})"): abs(count - int(batch.target_count()))})
        note(step + 1, {("loss", "the loss"): _finite(abs(loss / max(count, 1.0) - expected.loss))})
        note(step + 1, _differences("gradients", strategy.full_gradients(), expected.gradients))
        note(step + 1, _differences("weights", strategy.full_state_dict(), expected.weights))
    return _worst_of_ranks(worst), strategy


def _differences(kind: str, mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[tuple[str, str], float]:
    """{(kind, what): how far off}; a tensor that one side lacks is infinitely far off."""
    found = {}
    for name in [*theirs, *(n for n in mine if n not in theirs)]:
        there = name in mine and name in theirs
        size = relative(mine[name], theirs[name]) if there else float("inf")
        what = f"{kind.removesuffix('s')} of {name}"
        if there and kind == "gradients" and size > 1e-3:  # a sum for a mean shows as the number of ranks
            what += f" ({float(mine[name].norm() / theirs[name].norm()):.3g} times as large)"
        found[kind, what] = size
    return found


def _finite(size: float) -> float:
    """NaN compares with nothing; make it infinite."""
    return size if size == size else float("inf")


def _worst_of_ranks(mine: Comparison) -> Comparison:
    everyone: list[Comparison] = all_gather_objects(mine)
    firsts = [c.first for c in everyone if c.first is not None]
    return Comparison(
        loss=max(c.loss for c in everyone),
        gradients=max(c.gradients for c in everyone),
        weights=max(c.weights for c in everyone),
        first=min(firsts, key=lambda d: (d.step, d.rank), default=None),
    )
