"""The proof: every strategy, in every scenario, against one process; its traffic, order and memory against laws."""

import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isfinite

import torch

from lockstep.bar import Bar
from lockstep.comm.collectives import all_gather_objects
from lockstep.comm.ledger import Traffic
from lockstep.config import MLP, Config, Model, Parallel
from lockstep.config.user_code import shown_name
from lockstep.data import tensors_in
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.models import build_model
from lockstep.models.recompute import Recompute
from lockstep.parallel.law import Sent, added
from lockstep.strategies import STRATEGIES, Engine, ParallelModel, degrees_of, strategy_named
from lockstep.strategies.axes import model_degrees
from lockstep.strategies.combining import check_cuts, check_inputs
from lockstep.strategies.model_sizes import ModelSizes
from lockstep.strategies.native_context import CHUNK
from lockstep.strategies.pipeline import placement_for
from lockstep.strategies.table import Table, check_parallel
from lockstep.strategies.traffic import cut_on_meta
from lockstep.verify.compare import TOLERANCE, Comparison, compare, first_of_ranks, spread
from lockstep.verify.cost import Cost, worst
from lockstep.verify.dropout import check_dropout
from lockstep.verify.laws import check_apart, check_law
from lockstep.verify.loops import check_loop
from lockstep.verify.pipelines import check_pipeline
from lockstep.verify.reference import Reference
from lockstep.verify.resume import check_resume, check_samples
from lockstep.verify.scenarios import (
    CUT_GPT,
    EXPERT_GPT,
    TANGLED,
    Scenario,
    cut_scenarios,
    expert_scenarios,
    float8_scenarios,
    saver_scenarios,
    scenarios_for,
    switch_off_dropout,
    user_data,
    user_scenarios,
)
from lockstep.verify.structure import check_structure
from lockstep.verify.traffic import check_traffic
from lockstep.words import counted

BUCKET_MB = 0.01
"""Small enough that even the verifier's models fill several buckets."""


PLAIN = ("gpipe", "1f1b")
"""Schedules whose memory is checked with recomputation: they do not split backward."""


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
    expected: Sent | None = None
    cost: Cost = field(default_factory=Cost)
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
    steps: int = 4
    model: Model | None = None
    precision: str = "fp64"
    savers: bool = False
    """Verify activation checkpointing and LoRA with each strategy, instead of the plain scenarios."""
    own: Config | None = None
    """Verify with this config's model, data and loss, where they are the user's own."""
    experts: bool = False
    """Verify with models that have experts; strategies with ep always are."""
    float8: bool = False
    """Verify with layers that multiply in FP8."""
    optimizer: str | None = None
    """None: SGD in float32 and where a law is linear, AdamW elsewhere."""
    only_values: bool = False
    """Equality and traffic only; nothing of the order, memory, loops, dropout and resuming."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"--steps is {self.steps}, but it must be 1 or more")
        if self.precision not in TOLERANCE:
            raise UserError(f"--precision is {self.precision}, but equality is shown in {' or '.join(TOLERANCE)} only")

    @property
    def is_whole(self) -> bool:
        """With models of our own, for which we know what a step should cost."""
        return not self.savers and self.own is None and self.model is None and not self.only_values


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


def scenarios_of(request: Request, parallel: Parallel, table: Table = STRATEGIES) -> list[Scenario]:
    """In which situations a strategy is verified."""
    if request.savers:
        return saver_scenarios(request.model)
    if request.own is not None:
        return user_scenarios(request.own)
    if request.float8:
        return float8_scenarios(placement_for(parallel).parts)
    if request.experts or parallel.ep > 1:
        return expert_scenarios(placement_for(parallel).parts, adapted=not cut_axes(parallel))
    if all(degree == 1 for degree in model_degrees(parallel).values()):
        survives = request.is_whole and table[parallel.data].takes_any_graph
        return [*scenarios_for(request.model), *([TANGLED] if survives else [])]
    positions = 2 * parallel.cp * CHUNK if "cp" in parallel.native else 1
    found = cut_scenarios(request.model, placement_for(parallel).parts, positions)
    return [s for s in found if not (s.lora_rank and parallel.native)]  # PyTorch's own axes know no adapters


def check_request(request: Request, ranks: int, device: str) -> None:
    """Refuse what these ranks could not do, before any of them starts."""
    if request.own is not None:
        with torch.device("meta"):
            dropping = switch_off_dropout(build_model(request.own.model, user_data(request.own).spec))
        if dropping:
            print(f"dropout of {counted(dropping, 'module')} is switched off: ranks would draw other numbers")
    for name in request.strategies:
        parallel = strategy_named(name)
        precision = STRATEGIES[parallel.data].verified_in or request.precision
        check_parallel(parallel, device, precision, compiled=False)
        degrees_of(parallel, ranks)
        for scenario in scenarios_of(request, parallel):
            check_inputs(scenario.spec.example, parallel)
            with torch.device("meta"):
                check_cuts(scenario.build(seed=0), parallel, scenario.accumulation)


class Proofs:
    """The verdicts of one run; they share the references."""

    def __init__(self, world: World, request: Request, scenarios: list[Scenario] | None, table: Table) -> None:
        """`scenarios`: instead of those that the request and a strategy call for; nothing else is checked then."""
        self.world, self.request, self.scenarios, self.table = world, request, scenarios, table
        self._references: dict[tuple[str, str], Reference] = {}
        self._sizes: dict[tuple[object, ...], ModelSizes] = {}
        """Of models that have been cut alike."""
        self._samples_are_known = False
        self._one_host = len(set(all_gather_objects(socket.gethostname()))) == 1
        """Ranks share a disk."""
        self._resumed: set[tuple[type[Engine], tuple[str, ...], bool, bool]] = set()

    def of(self, name: str) -> Verdict:
        defaults = Parallel(bucket_mb=BUCKET_MB, topk_ratio=0.1, powersgd_rank=1)
        parallel = strategy_named(name, defaults, self.table)
        engine = self.table[parallel.data]
        scenarios = self.scenarios or scenarios_of(self.request, parallel, self.table)
        law = engine.facts(parallel).law
        equal: Parallel | None = parallel
        verdict = Verdict(name, self.world.size, law="" if law is None else law.says)
        if law is not None:
            equal = law.equal_form
            broken = check_law(self.world, parallel, self.request.precision)
            if broken is None and law.trains_apart and not cut_axes(parallel):
                broken = check_apart(self.world, parallel, self.request.precision, self.table)
            verdict.failures += [f"law broken: {said}" for said in first_of_ranks([broken] if broken else [])]
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
            verdict.models[shown_name(scenario.model)] = strategy.parameters
            if comparison.first is not None:
                verdict.failures.append(f"{scenario.name}: {comparison.first}")
            if index == 0:
                self._check_traffic(verdict, strategy, scenario)
                verdict.failures += self._check_not_finite(strategy, scenario)
        if self.request.is_whole and self.scenarios is None and not verdict.failures:
            for broken_laws in self._checks(parallel, precision, verdict.cost):
                verdict.failures += first_of_ranks(broken_laws)
        verdict.cost = worst(all_gather_objects(verdict.cost))
        return verdict

    # ---- besides equality ----------------------------------------------------------------------------------------

    def _checks(self, parallel: Parallel, precision: str, cost: Cost) -> Iterator[list[str]]:
        """Laws that this rank has found broken, check by check. Every rank goes through them together."""
        engine = self.table[parallel.data]
        facts, cut = engine.facts(parallel), cut_axes(parallel)
        exact = facts.law is None
        on_cpu = self.world.device.type == "cpu"  # CUDA events have no order on the host, and a GPU's sums vary
        layers = max(4 if parallel.ep == 1 else 8, placement_for(parallel).parts - 2)  # experts are reduced apart
        recompute: Recompute = "full" if parallel.cp > 1 or (parallel.pp > 1 and parallel.schedule in PLAIN) else "none"
        model = EXPERT_GPT if parallel.ep > 1 else CUT_GPT
        structured = Scenario("structure", replace(model, layers=layers), (8,), recompute=recompute)
        if exact and on_cpu and not parallel.native and precision == "fp64":
            reference = self._reference(structured, parallel)
            strategy = spread(reference, parallel, self.table)
            batches = [structured.global_batch(step).share(strategy.batch_share()) for step in range(3)]
            check = check_pipeline if parallel.pp > 1 else check_structure
            yield check(strategy, batches, cost)
            yield self._check_state(strategy, structured, cost)
            if engine.leaves_in_flight and not cut:
                layers_only = Scenario("layers only", MLP(layers=6, width=24), (8,))  # nothing lies outside the blocks
                strategy = spread(self._reference(layers_only, parallel), parallel, self.table)
                share = strategy.batch_share()
                yield check_structure(strategy, [layers_only.global_batch(i).share(share) for i in range(3)], Cost())
            if not self._samples_are_known:
                self._samples_are_known = True
                yield check_samples(strategy)
        if engine.takes_any_graph and exact and not cut:
            reference = self._reference(replace(TANGLED, clip_norm=None), parallel)
            yield check_loop(spread(reference, parallel, self.table), reference)
        drops = parallel.tp > 1 or facts.divides[0]
        if exact and drops and on_cpu and not parallel.native and precision == "fp64":
            scenario = Scenario("dropout", replace(model, layers=layers, dropout=0.3), (max(8, self.world.size),))
            yield check_dropout(self.world, scenario, parallel, self.table)
        if exact and facts.divides[0] and not cut and on_cpu:
            yield self._check_bf16(structured, parallel)
        axes = tuple(axis for axis, degree in model_degrees(parallel).items() if degree > 1)
        kind = (engine, axes, parallel.outer_lr > 0, parallel.outer_delay > 0)
        knows = self.world.size == 2 and on_cpu and self.table is STRATEGIES and self._one_host
        if knows and not parallel.native and kind not in self._resumed:
            self._resumed.add(kind)  # what is saved depends on the engine and the axes, not on when it sends
            yield check_resume(self.world, replace(parallel, sync_every=2), precision)

    def _check_not_finite(self, strategy: ParallelModel, scenario: Scenario) -> list[str]:
        """A sample of the last rank is not a number: no rank may take the step."""
        batch = scenario.global_batch(0)
        floats = [t for t in tensors_in(batch.inputs) if t.is_floating_point() and t.dim()]
        if not floats or not strategy.engine.skips_not_finite:
            return []
        for tensor in floats:
            tensor[-1] = float("nan")
        before = {name: held.tensor.clone() for name, held in strategy.held().items()}
        result = strategy.step(batch.share(strategy.batch_share()))
        after, broken = strategy.held(), list[str]()
        if not isfinite(result.loss):  # else the model makes a number of it
            moved = [name for name, tensor in before.items() if not torch.equal(after[name].tensor, tensor)]
            broken += [f"not finite: the step was taken, and {moved[0]} has moved"] if moved else []
            broken += ["not finite: the step is not reported as skipped"] if not result.skipped and not moved else []
        return first_of_ranks(broken)

    def _check_bf16(self, scenario: Scenario, parallel: Parallel) -> list[str]:
        """Gathered in bf16, reduced in fp32: counted in bytes."""
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without units for it is slow, no more
        reference = Reference(self.world, scenario, 1, "bf16", "adamw")
        strategy = spread(reference, parallel, self.table)
        batch = scenario.global_batch(0).share(strategy.batch_share())
        for _ in range(2):
            strategy.step(batch)
        broken, _ = check_traffic(strategy, scenario, scenario.global_batch(0), self.table, torch.bfloat16)
        return [f"in bf16, {said}" for said in broken]

    def _check_traffic(self, verdict: Verdict, strategy: ParallelModel, scenario: Scenario) -> None:
        """Of the last step. A rank may have found what others have not: all of them hear of it."""
        verdict.counted = strategy.ledger.traffic()
        broken, laws = check_traffic(strategy, scenario, scenario.global_batch(0), self.table)
        verdict.expected = added(laws.values())
        verdict.cost.count_calls(strategy.ledger, laws)
        verdict.failures += first_of_ranks(broken)

    def _check_state(self, strategy: ParallelModel, scenario: Scenario, cost: Cost) -> list[str]:
        """What a rank holds between steps, by the shapes that the axes of the model leave it."""
        parallel = strategy.parallel
        key = (repr(scenario), parallel.tp, parallel.cp, parallel.ep, parallel.pp, placement_for(parallel).chunks)
        if key not in self._sizes:
            with torch.device("meta"):
                model = scenario.build(seed=0).to(strategy.options.dtype)
            self._sizes[key] = ModelSizes.of(cut_on_meta(model, strategy.layout, parallel, strategy.options.loss)[0])
        sizes = self._sizes[key]
        return cost.weigh_state(strategy, sizes.shapes, sizes.itemsize) if not sizes.parts else []

    def _reference(self, scenario: Scenario, parallel: Parallel) -> Reference:
        """Adam divides by its own noise, so float32 is compared under SGD. Local SGD equals one process only where
        everything is linear in the gradient: SGD, and no clipping, since local norms are not the global one.
        """
        law = self.table[parallel.data].facts(parallel).law
        linear = law is not None and law.linear_only
        precision = self.table[parallel.data].verified_in or self.request.precision
        optimizer = self.request.optimizer or ("sgd" if linear or precision == "fp32" else "adamw")
        if linear:
            scenario = replace(scenario, clip_norm=None)
        key = (repr(scenario), "linear" if linear else precision)
        if key not in self._references:
            self._references[key] = Reference(self.world, scenario, self.request.steps, precision, optimizer)
        return self._references[key]


def cut_axes(parallel: Parallel) -> bool:
    """Whether the model itself is cut."""
    return any(degree > 1 for degree in model_degrees(parallel).values())
