"""A strategy and one process, step by step on the same global batches.

Every rank compares what it holds, region by region, with the same regions of the reference; and all ranks' regions
together must cover every parameter.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.collectives import all_gather_objects
from lockstep.config import Parallel
from lockstep.config.own import imported
from lockstep.data import IGNORED, Batch
from lockstep.layout import Held, Region, World
from lockstep.layout.region import uncovered
from lockstep.models import is_others
from lockstep.models.deferred import Deferred
from lockstep.models.loss import loss_for
from lockstep.strategies import STRATEGIES, Options, ParallelModel, make_layout, parallelize
from lockstep.strategies.table import Table
from lockstep.training.optimizer import optimizer_factory
from lockstep.verify.scenarios import Scenario

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
        self._model = self.scenario.build(seed=0).to(self.world.device, self.dtype)
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
        own_loss = self.scenario.own_loss
        if own_loss is not None:
            loss = imported(own_loss, "train.loss")(outputs, targets)
        elif self.scenario.spec.kind == "regression":
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
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}


def compare(
    reference: Reference, parallel: Parallel, steps: int, table: Table = STRATEGIES
) -> tuple[Comparison, ParallelModel]:
    """Run a strategy beside the reference. Returns the worst differences and the strategy, as it is after the last."""
    world, scenario = reference.world, reference.scenario
    options = Options(
        loss=loss_for(scenario.spec.kind, scenario.own_loss),
        make_optimizer=reference.make_optimizer,
        parallel=parallel,
        accumulation=scenario.accumulation,
        clip_norm=scenario.clip_norm,
        precision=reference.precision,
        recompute=scenario.recompute,
        keep_gradients=True,
    )
    # Each rank starts from other weights: a strategy must begin by making them rank 0's.
    build = partial(scenario.build, seed=world.rank)
    model = build() if is_others(scenario.model) else Deferred(build)
    strategy = parallelize(model, make_layout(world, parallel, table), options, table)
    worst, tolerance = Comparison(), TOLERANCE[reference.precision]
    share = strategy.batch_share()

    def note(step: int, differences: dict[tuple[str, str], float]) -> None:
        for (kind, name), size in differences.items():
            setattr(worst, kind, max(getattr(worst, kind), size))
            if not size <= tolerance and worst.first is None:
                worst.first = Difference(step, world.rank, name, size)

    note(0, differences("weights", weights_of(strategy), reference.initial))
    for step in range(steps):
        expected, batch = reference.after(step), scenario.global_batch(step)
        got = strategy.step(batch.share(share))
        loss, _, count = got.totals.read()
        note(step + 1, {("loss", f"the number of targets ({count:.0f})"): abs(count - int(batch.target_count()))})
        note(step + 1, {("loss", "the loss"): _finite(abs(loss / max(count, 1.0) - expected.loss))})
        note(step + 1, differences("gradients", strategy.gradients(), expected.gradients))
        note(step + 1, differences("weights", weights_of(strategy), expected.weights))
    return _worst_of_ranks(worst), strategy


def weights_of(strategy: ParallelModel) -> dict[str, Held]:
    """Parameters, and buffers, which every rank has whole."""
    buffers = {name: Held(b, Region.whole(b.shape)) for name, b in strategy.model.named_buffers()}
    return {**strategy.held(), **buffers}


def differences(kind: str, mine: dict[str, Held], theirs: dict[str, Tensor]) -> dict[tuple[str, str], float]:
    """{(kind, what): how far off}, of what this rank holds; what no rank holds is infinitely far off on all."""
    found = {}
    missing = _not_covered({name: held.region for name, held in mine.items()}, theirs)
    for name in [*theirs, *(n for n in mine if n not in theirs)]:
        what = f"{kind.removesuffix('s')} of {name}"
        if name not in theirs or name in missing:
            found[kind, what + missing.get(name, " (one process has none)")] = float("inf")
        elif name in mine:
            found |= {(kind, what + times): size for times, size in [_difference(kind, mine[name], theirs[name])]}
    return found


def _difference(kind: str, mine: Held, theirs: Tensor) -> tuple[str, float]:
    """(what to say of it, how far this rank's region is off), relative to the tensor's norm where that exceeds 1."""
    got, expected = mine.tensor.reshape(-1), mine.region.read(theirs)
    largest = float((got - expected).abs().max()) if expected.numel() else 0.0
    size = _finite(largest / max(1.0, float(theirs.norm())))
    if kind == "gradients" and size > 1e-3:  # a sum for a mean shows as the number of ranks
        return f" ({float(got.norm() / expected.norm()):.3g} times as large)", size
    return "", size


def _not_covered(mine: dict[str, Region], theirs: dict[str, Tensor]) -> dict[str, str]:
    """Names of which some elements are on no rank, or whose shape is another, and what to say of them."""
    everyone: list[dict[str, Region]] = all_gather_objects(mine)
    missing = {}
    for name, tensor in theirs.items():
        regions = [regions[name] for regions in everyone if name in regions]
        shape = tuple(tensor.shape)
        if any(region.shape != shape for region in regions):
            missing[name] = f" (of shape {regions[0].shape} instead of {shape})"
        elif not any(region.is_whole for region in regions) and (left := uncovered(regions, shape)):
            missing[name] = f" ({left} of {tensor.numel()} elements on no rank)"
    return missing


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
