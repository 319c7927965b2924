"""The proof: every strategy, in every scenario, against one process; then its traffic against theory."""

from dataclasses import dataclass, field, replace

import torch

from lockstep.bar import Bar
from lockstep.comm.ledger import Traffic
from lockstep.config import Config, Model, Parallel
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.strategies import STRATEGIES, ParallelModel, degrees_of, strategy_named
from lockstep.strategies.axes import model_degrees
from lockstep.strategies.combining import check_cuts
from lockstep.strategies.native_context import CHUNK
from lockstep.strategies.pipeline import placement_for
from lockstep.strategies.table import Table, check_parallel
from lockstep.strategies.theory import Theory, added
from lockstep.strategies.traffic import traffic_by_axis
from lockstep.verify.compare import TOLERANCE, Comparison, Reference, compare
from lockstep.verify.laws import check_law
from lockstep.verify.scenarios import Scenario, cut_scenarios, own_scenarios, saver_scenarios, scenarios_for
from lockstep.words import counted

BUCKET_MB = 0.01
"""Small enough that even the verifier's models fill several buckets."""


@dataclass
class Verdict:
    """All that was found out about one strategy at one world size."""

    strategy: str
    world_size: int
    law: str
    """Empty: the strategy is equal to one process. Else what it is held to instead."""
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    models: dict[str, int] = field(default_factory=dict)
    """With which it was compared: name -> parameters."""
    counted: Traffic | None = None
    traffic_is_seen: bool = True
    """False where an engine sends out of our sight."""
    expected: Theory | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def worst(self, field_name: str) -> float:
        return max((getattr(c, field_name) for c in self.comparisons.values()), default=0.0)


@dataclass
class Request:
    """What to verify, and how strictly."""

    strategies: list[str]
    steps: int = 20
    model: Model | None = None
    precision: str = "fp64"
    savers: bool = False
    """Verify activation checkpointing and LoRA with each strategy, instead of the plain scenarios."""
    own: Config | None = None
    """Verify with this config's model, data and loss, where they are the user's own."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"--steps is {self.steps}, but it must be 1 or more")
        if self.precision not in TOLERANCE:
            raise UserError(f"--precision is {self.precision}, but equality is shown in {' or '.join(TOLERANCE)} only")


def verify(world: World, request: Request, table: Table | None = None) -> list[Verdict]:
    """Verify strategies on the ranks of `world`; every rank returns the same verdicts.

    `table` replaces STRATEGIES, for strategies that are not in it (yet).
    """
    proofs = Proofs(world, request, None, table or STRATEGIES)
    verdicts = []
    with Bar(disable=not world.is_main) as progress:
        task = progress.add_task(counted(world.size, "rank"), total=len(request.strategies))
        for name in request.strategies:
            progress.update(task, description=f"{counted(world.size, 'rank')}: {name:<18}")
            verdicts.append(proofs.of(name))
            progress.advance(task)
    return verdicts


def scenarios_of(request: Request, parallel: Parallel) -> list[Scenario]:
    """In which situations a strategy is verified."""
    if request.savers:
        return saver_scenarios(request.model)
    if request.own is not None:
        return own_scenarios(request.own)
    if all(degree == 1 for degree in model_degrees(parallel).values()):
        return scenarios_for(request.model)
    positions = 2 * parallel.cp * CHUNK if "cp" in parallel.native else 1
    found = cut_scenarios(request.model, placement_for(parallel).parts, positions)
    return [s for s in found if not (s.lora_rank and parallel.native)]  # PyTorch's own axes know no adapters


def check_request(request: Request, ranks: int, device: str) -> None:
    """Refuse what these ranks could not do, before any of them starts."""
    for name in request.strategies:
        parallel = strategy_named(name)
        precision = STRATEGIES[parallel.data].verified_in or request.precision
        check_parallel(parallel, device, precision, compiled=False)
        degrees_of(parallel, ranks)
        for scenario in scenarios_of(request, parallel):
            with torch.device("meta"):
                check_cuts(scenario.build(seed=0), parallel, scenario.accumulation)


class Proofs:
    """The verdicts of one run; they share the references."""

    def __init__(self, world: World, request: Request, scenarios: list[Scenario] | None, table: Table) -> None:
        """`scenarios`: instead of those that the request and a strategy call for."""
        self.world, self.request, self.scenarios, self.table = world, request, scenarios, table
        self._references: dict[tuple[str, str], Reference] = {}

    def of(self, name: str) -> Verdict:
        defaults = Parallel(bucket_mb=BUCKET_MB, topk_ratio=0.1, powersgd_rank=1)
        parallel = strategy_named(name, defaults, self.table)
        engine, scenarios = self.table[parallel.data], self.scenarios or scenarios_of(self.request, parallel)
        law = engine.facts(parallel).law
        equal: Parallel | None = parallel
        verdict = Verdict(name, self.world.size, law="" if law is None else law.says)
        if law is not None:
            equal = law.equal_form
            if (broken := check_law(self.world, parallel, self.request.precision)) is not None:
                verdict.failures.append(f"law broken: {broken}")
        precision = engine.verified_in or self.request.precision
        if precision != self.request.precision:
            verdict.law = f"equality, {precision}"
        if equal is None:  # there is no setting in which it equals one process: run it for its traffic only
            _, strategy = compare(self._reference(scenarios[0], parallel), parallel, 2, self.table)
            self._check_traffic(verdict, strategy, scenarios[0])
            return verdict
        for index, scenario in enumerate(scenarios):
            comparison, strategy = compare(self._reference(scenario, equal), equal, self.request.steps, self.table)
            verdict.comparisons[scenario.name] = comparison
            verdict.models[scenario.model.name] = strategy.parameters
            if comparison.first is not None:
                verdict.failures.append(f"{scenario.name}: {comparison.first}")
            if index == 0:
                self._check_traffic(verdict, strategy, scenario)
        return verdict

    def _reference(self, scenario: Scenario, parallel: Parallel) -> Reference:
        """Adam divides by its own noise, so float32 is compared under SGD. Local SGD equals one process only where
        everything is linear in the gradient: SGD, and no clipping, since local norms are not the global one.
        """
        law = self.table[parallel.data].facts(parallel).law
        linear = law is not None and law.linear_only
        precision = self.table[parallel.data].verified_in or self.request.precision
        optimizer = "sgd" if linear or precision == "fp32" else "adamw"
        if linear:
            scenario = replace(scenario, clip_norm=None)
        key = (repr(scenario), "linear" if linear else precision)
        if key not in self._references:
            self._references[key] = Reference(self.world, scenario, self.request.steps, precision, optimizer)
        return self._references[key]

    def _check_traffic(self, verdict: Verdict, strategy: ParallelModel, scenario: Scenario) -> None:
        """Of the last step: what the engine sends along the data axes, and what the axes of the model send."""
        layout, parallel, options = strategy.layout, strategy.parallel, strategy.options
        with torch.device("meta"):
            model = scenario.build(seed=0).to(options.dtype)
        batch = scenario.global_batch(0).share(strategy.batch_share())
        expected = traffic_by_axis(model, layout, parallel, options.loss, batch, options.accumulation, self.table)
        verdict.counted, verdict.traffic_is_seen = strategy.ledger.traffic(), strategy.engine.traffic_is_seen
        if any(True for _ in model.buffers()):
            return  # they travel too
        verdict.expected = added(expected.values())
        counted_ = {axis: strategy.ledger.traffic(axis) for axis in expected}
        for axis, theory in expected.items():
            if theory is not None and not theory.matches(counted_[axis]):
                verdict.failures.append(
                    f"traffic{'' if axis == 'data' else f' of {axis}'}: {counted_[axis].collectives} collectives and "
                    f"{counted_[axis].wire_bytes:,.0f} bytes per step counted, {theory.collectives} and "
                    f"{theory.wire_bytes:,.0f} by theory"
                )
