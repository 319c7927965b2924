"""A strategy and one process, step by step on the same global batches.

Every rank compares what it holds, region by region, with the same regions of the reference; and all ranks' regions
together must cover every parameter. To look at weights is to wait for them, which would hide a missing wait:
so in some scenarios weights are read at every third step only, and communication comes late.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf, isclose

from torch import Tensor

from lockstep.apart import finite, norm_of, one_factor, scale_of
from lockstep.comm.collectives import all_gather_objects
from lockstep.comm.lane import late
from lockstep.config import Parallel
from lockstep.data import Samples
from lockstep.layout import Held, Region
from lockstep.layout.region import uncovered
from lockstep.models.loss import loss_for
from lockstep.strategies import STRATEGIES, Options, ParallelModel, StepResult, make_layout, parallelize
from lockstep.strategies.table import Table
from lockstep.training.evaluate import evaluate
from lockstep.verify.activations import Activations, first_that_differs
from lockstep.verify.entry import Entry, idle
from lockstep.verify.reference import Moment, Reference
from lockstep.verify.scenarios import Scenario

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
"""Relative to the norm of the tensor."""
FLOOR = {"fp64": 1e-3, "fp32": 0.1}
"""Of the norm of all tensors together: below it a tensor is rounding, to which nothing can be relative."""
NORM = "the norm of the gradients"
EVALUATE_AFTER = 1
"""Step, counted from 0: evaluation must not change what comes after it."""


@dataclass
class Difference:
    """The first place where a rank left the reference."""

    step: int
    """0: before the first."""
    rank: int
    what: str
    size: float
    derived: bool = False
    """It follows from something else, if that differs too."""

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step else "before the first step"
        return f"{when}, {self.what} differs by {self.size:.1e} on rank {self.rank}"


@dataclass
class Comparison:
    """How far one strategy was from one process, over all steps and ranks."""

    loss: float = 0.0
    """Also of the count of targets, the accuracy and the evaluation."""
    gradients: float = 0.0
    """Also of their norm."""
    weights: float = 0.0
    first: Difference | None = None


def spread(reference: Reference, parallel: Parallel, table: Table = STRATEGIES) -> ParallelModel:
    """The scenario's model under a strategy. Each rank starts from other weights: a strategy must begin by making them
    rank 0's.
    """
    world, scenario = reference.world, reference.scenario
    options = Options(
        loss=loss_for(scenario.spec.kind, scenario.user_loss, scenario.spec.classes),
        make_optimizer=reference.make_optimizer,
        parallel=parallel,
        accumulation=scenario.accumulation,
        clip_norm=scenario.clip_norm,
        precision=reference.precision,
        recompute=scenario.recompute,
        keep_gradients=True,
    )
    return parallelize(scenario.unbuilt(world.rank), make_layout(world, parallel, table), options, table)


def compare(
    reference: Reference, parallel: Parallel, steps: int, table: Table = STRATEGIES
) -> tuple[Comparison, ParallelModel]:
    """Run a strategy beside the reference. Returns the worst differences and the strategy, as it is after the last."""
    scenario, strategy = reference.scenario, spread(reference, parallel, table)
    entry = Entry(strategy, scenario.local_buffers)
    found = Findings(strategy, TOLERANCE[reference.precision], FLOOR[reference.precision], scenario, entry)
    found.note(0, found.of("weights", weights_of(strategy), reference.initial))
    share = strategy.batch_share()
    unread: list[tuple[int, StepResult, Moment]] = []
    for step in range(steps):
        expected, batch = reference.after(step), scenario.global_batch(step)
        strategy.set_learning_rate(reference.learning_rate(step))
        delays = late(1000 * step + strategy.world.rank) if scenario.unobserved else nullcontext()
        with Activations(strategy.model) as activations, delays, found.buffers.watching():
            unread.append((step + 1, strategy.step(batch.share(share)), expected))
        observed = not scenario.unobserved or step % 3 == 2 or step == steps - 1
        if not observed:
            continue
        for number, result, moment in unread:
            found.step(number, result, moment, scenario.global_batch(number - 1).target_count(strategy.worker.ignored))
        if any(all_gather_objects(found.loss_differs)):
            found.where = first_that_differs(strategy, activations.outputs, expected.activations, found.tolerance)
        norms, unread = unread, []
        found.note(step + 1, found.buffers.differences(strategy.layout.batch))
        found.note(
            step + 1,
            {("weights", f"the mode of {name} (not that of training)"): inf for name in idle(strategy, reference.idle)},
        )
        found.note(step + 1, found.of("gradients", strategy.gradients(), expected.gradients))
        for number, result, moment in norms:
            found.norm(number, result, moment)
        found.note(step + 1, found.of("weights", weights_of(strategy), expected.weights))
        if step in (EVALUATE_AFTER, steps - 1) or scenario.unobserved:
            found.evaluation(step + 1, expected)
        if found.somewhere():
            break  # what follows is wrong because of it
    return found.worst_of_ranks(), strategy


@dataclass
class Findings:
    """What one rank has found so far."""

    strategy: ParallelModel
    tolerance: float
    floor: float
    scenario: Scenario
    buffers: Entry
    worst: Comparison = field(default_factory=Comparison)
    loss_differs: bool = False
    where: str = ""
    """Which activation differs first, if the loss does."""
    _missing: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)

    def note(self, step: int, differences: dict[tuple[str, str], float]) -> None:
        for (kind, name), size in differences.items():
            setattr(self.worst, kind, max(getattr(self.worst, kind), size))
            first = self.worst.first
            if not size <= self.tolerance and (first is None or step < first.step):
                derived = name.startswith(NORM)
                self.worst.first = Difference(step, self.strategy.world.rank, name, size, derived)

    def step(self, step: int, result: StepResult, expected: Moment, count: int | Tensor) -> None:
        """What a step gives besides weights; the same on every rank."""
        got = result.numbers()
        self.note(step, {("loss", f"the number of targets ({got.targets:.0f})"): abs(got.targets - int(count))})
        mean = got.loss_sum / max(got.targets, 1.0)
        size = finite(abs(mean - expected.loss) / max(1.0, abs(expected.loss)))
        self.loss_differs |= size > self.tolerance
        self.note(step, {("loss", "the loss"): size})
        use = None if self.scenario.unobserved else self.strategy.expert_use()
        if use is not None:
            off = abs(use.auxiliary_loss - expected.auxiliary)
            self.note(step, {("loss", "the auxiliary loss of the experts"): finite(off / max(1.0, expected.auxiliary))})
            missed = sum(
                abs(one - other)
                for n, load in expected.load.items()
                for one, other in zip(use.load[n], load, strict=True)
            )
            self.note(step, {("loss", f"how many tokens took each expert ({missed} choices off)"): float(missed)})
        if expected.correct is not None:
            said = f"the number of right answers ({got.correct:.0f} for {expected.correct:.0f})"
            self.note(step, {("loss", said): abs(got.correct - expected.correct)})

    def norm(self, step: int, result: StepResult, expected: Moment) -> None:
        """Looked at after the gradients: where those differ, so does their norm."""
        if self.strategy.engine.reports_norm:
            got = result.numbers()
            off = finite(abs(got.grad_norm - expected.norm) / max(expected.norm, 1e-30))
            said = f"{NORM} ({got.grad_norm:.6g} for {expected.norm:.6g})"
            self.note(step, {("gradients", said): off})

    def evaluation(self, step: int, expected: Moment) -> None:
        """Over samples that no number of ranks divides, in batches that leave ranks without any."""
        batch = self.scenario.test_batch().to(self.strategy.world.device, self.strategy.options.dtype)
        with self.buffers.watching():
            found = evaluate(self.strategy, Samples(batch.inputs, batch.targets), batch_size=4)
        assert found is not None, "no rank was asked to stop"
        self.note(step, self.buffers.differences(self.strategy.layout.batch))
        if self.buffers.trained:
            self.note(step, {("loss", "the mode of evaluation (that of training)"): inf})
        (loss, accuracy), (wanted, right) = found, expected.evaluation
        self.note(step, {("loss", "the evaluated loss"): finite(abs(loss - wanted) / max(1.0, abs(wanted)))})
        if right is not None:
            self.note(step, {("loss", "the evaluated accuracy"): finite(abs(accuracy - right))})

    def of(self, kind: str, mine: dict[str, Held], theirs: dict[str, Tensor]) -> dict[tuple[str, str], float]:
        """{(kind, what): how far off} of what this rank holds, in backward's order; what no rank holds is infinitely
        far off on all. Where all gradients are off by one factor, that is said of all of them.
        """
        found: dict[tuple[str, str], float] = {}
        factors: list[float | None] = []
        key = (kind, *theirs)
        if key not in self._missing:  # regions stay as they are
            self._missing[key] = not_covered({name: held.region for name, held in mine.items()}, theirs)
        missing = self._missing[key]
        total = norm_of(theirs.values())
        names = [*reversed(theirs), *(n for n in mine if n not in theirs and n not in self.scenario.local_buffers)]
        for name in names:
            what = f"{kind.removesuffix('s')} of {name}"
            if name not in theirs or name in missing:
                found[kind, what + missing.get(name, " (one process has none)")] = inf
            elif name in mine:
                got, expected = mine[name].tensor.reshape(-1), mine[name].region.read(theirs[name])
                if not got.is_floating_point():  # a buffer of numbers, or of yes and no
                    got, expected = got.double(), expected.double()
                largest = float((got - expected).abs().max()) if expected.numel() else 0.0
                size = finite(largest / scale_of(theirs[name], total, self.floor))
                if kind == "gradients" and size > 1e-6:
                    factor = one_factor(got, expected)
                    factors.append(factor)
                    times = factor if factor is not None else float(got.norm() / expected.norm())
                    what += f" ({times:.4g} times as large)"
                found[kind, what] = size
        common = factors[0] if len(factors) == len(found) > 2 else None
        if common is not None and all(f is not None and isclose(f, common, rel_tol=1e-6) for f in factors):
            return {
                (kind, f"the norm or the mean (every gradient is {common:.6g} times as large)"): max(found.values())
            }
        return found

    def somewhere(self) -> bool:
        """Some rank has left the reference."""
        return any(all_gather_objects(self.worst.first is not None))

    def worst_of_ranks(self) -> Comparison:
        everyone: list[Comparison] = all_gather_objects(self.worst)
        firsts = [c.first for c in everyone if c.first is not None]
        first = min(firsts, key=lambda d: (d.step, d.derived, d.rank), default=None)
        if first is not None and first.what == "the loss":
            first.what += self.where
        return Comparison(
            loss=max(c.loss for c in everyone),
            gradients=max(c.gradients for c in everyone),
            weights=max(c.weights for c in everyone),
            first=first,
        )


def weights_of(strategy: ParallelModel) -> dict[str, Held]:
    """Parameters, and buffers, which every rank has whole."""
    buffers = {name: Held(b, Region.whole(b.shape)) for name, b in strategy.model.named_buffers()}
    return {**strategy.held(), **buffers}


def not_covered(mine: dict[str, Region], theirs: dict[str, Tensor]) -> dict[str, str]:
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


def first_of_ranks(broken: list[str]) -> list[str]:
    """The first rank's that has any. Every rank must ask together."""
    for rank, theirs in enumerate(all_gather_objects(broken)):
        if theirs:
            return [f"{one} (rank {rank})" for one in theirs]
    return []
