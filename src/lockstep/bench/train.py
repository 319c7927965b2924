"""Training steps of several strategies, taken in turns in one run, so that a noisy machine disturbs all alike."""

import gc
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn

from lockstep.bench.apart import Apart
from lockstep.bench.parts import part_of
from lockstep.comm.collectives import all_gather_objects
from lockstep.comm.hosts import hosts_meet
from lockstep.config import Config, Parallel, check_ranges
from lockstep.data import Batch, DataSet, DataSpec, read_share
from lockstep.errors import UserError
from lockstep.launch.cores import local_cores
from lockstep.layout.world import World
from lockstep.measure.expected import averaging_cycle, named_config, theory_of
from lockstep.measure.memory import Memory
from lockstep.measure.peak import peak_flops
from lockstep.measure.steps import MEMORY_STEPS, full_batches, memory_of_steps, timed_step
from lockstep.measure.timeline import timeline
from lockstep.measure.timing import Timing, merge_ranks
from lockstep.models import build_model
from lockstep.strategies import STRATEGIES, ParallelModel
from lockstep.training.prepare import check_device, load_data, load_head, prepare_named

Progress = Callable[[], None]


@dataclass
class Case:
    """One row of the table: a strategy on a config, on the first `ranks` ranks (None: all)."""

    label: str
    strategy: str
    """Its name; `ddp@gloo` names the backend too."""
    config: Config
    ranks: int | None = None
    all_cores: bool = False
    """It is one process, and has the cores of all ranks."""
    details: dict[str, Any] = field(default_factory=dict)


def bench_cases(
    world: World,
    cases: list[Case],
    steps: int,
    warmup: int,
    progress: Progress | None = None,
    peaks: "Peaks | None" = None,
) -> list[Timing]:
    """Time `steps` steps of each case after `warmup` untimed ones. A step counts as long as its slowest rank.

    While a case runs that needs fewer ranks, the others sleep.
    """
    cases = [replace(case, config=with_enough_data(case.config)) for case in cases]
    for case in cases:
        check_ranges(case.config)
        check_device(world, case.config)
    runners = make_runners(world, cases, peaks or Peaks())
    for round_ in range(warmup + steps):
        turn = round_ % len(runners)
        for runner in runners[turn:] + runners[:turn]:
            runner.step(round_, timed=round_ >= warmup)
        if progress is not None:
            progress()
    found = [runner.result() for runner in runners]
    runners.clear()
    gc.collect()  # models and their hooks refer to each other
    return found


def one_process(cases: list[Case]) -> list[Case]:
    """What the speed-up refers to: each different model and batch, once, on one rank; unless `single` is among them."""
    different = [case for case in cases if case.strategy == "single"]
    known = len(different)
    for case in cases:
        config = replace(case.config, parallel=Parallel(data="single"))
        values = list(case.details.values())
        which = "".join(f" {value}" for value in [v for v in values if isinstance(v, str)] or values[:1])
        alone = Case(f"one process{which}", "single", config, ranks=1, all_cores=True, details=case.details)
        if not any(_same_config(alone, other) for other in different):
            different.append(alone)
    if len(different) == 1 and not known:
        different[0].label = "one process"
    return different[known:]


def _same_config(a: Case, b: Case) -> bool:
    return (a.config.model, a.config.data, a.config.train) == (b.config.model, b.config.data, b.config.train)


def with_enough_data(config: Config) -> Config:
    """A synthetic data set costs nothing: as many samples as a batch has, at least."""
    if config.data.name != "synthetic" or config.data.samples >= config.train.batch_size:
        return config
    return replace(config, data=replace(config.data, samples=config.train.batch_size))


class Runner:
    """One case on this rank, ready to take steps; on a rank that it does not need, it only keeps the others' time."""

    def __init__(
        self,
        world: World,
        case: Case,
        lead_in: bool = False,
        peaks: "Peaks | None" = None,
        models: "Models | None" = None,
    ) -> None:
        """`lead_in`: each timed step follows another one of the same case; see `timed_step`."""
        peaks, models = peaks or Peaks(), models or Models()
        self.world, self.case, self.lead_in = world, case, lead_in
        self.part = part_of(world, case.ranks, case.strategy.partition("@")[2])
        dataset = load_head(world, case.config)
        self.data = dataset.train
        self.batches = full_batches(case.config, dataset)
        if len(self.batches[0]) < case.config.train.batch_size:
            raise UserError(
                f"{case.label}: a batch of {case.config.train.batch_size} needs as many samples, and there are "
                f"{len(dataset.train)}; lower train.batch_size or give --data.samples"
            )
        self.timing: Timing | None = None
        if self.part is not None:
            plain = models.of(case.config, dataset.spec)
            prepare = partial(prepare_named, self.part, case.config, case.strategy, dataset, plain)
            memory = memory_of_steps(world.device, prepare, partial(first_batches, case, dataset))
            self.strategy = prepare()
            # What a step costs does not depend on the rate, and with a rate of 0 no model diverges.
            self.strategy.set_learning_rate(0.0)
            self.strategy.ledger.sees_ends = True
            peak = peaks.of(self.part, case.config.train.precision)
            self.timing = new_timing(self.part, case, self.strategy, dataset, memory, peak)
        hosts_meet(world.device)

    def step(self, round_: int, timed: bool) -> None:
        if self.timing is None or self.part is None:
            hosts_meet(self.world.device)
            return
        indices = self.batches[round_ % len(self.batches)]
        batch = read_share(self.data, indices, self.strategy.batch_share())
        seconds, result = timed_step(self.world, self.strategy, batch, self.lead_in)
        if timed:
            self.timing.record(seconds, self.strategy.ledger, self.strategy.phases, result.skipped)
            self.timing.timelines.append(timeline(self.strategy))

    def result(self) -> Timing:
        """Of all ranks; every rank must call it."""
        everyone = all_gather_objects(self.timing)
        cycle = averaging_cycle(named_config(self.case.config, self.case.strategy))
        merged = merge_ranks([timing for timing in everyone if timing is not None], cycle)
        if merged.skipped:
            raise UserError(
                f"{self.case.label}: {merged.skipped} of {len(merged.step_s)} timed steps were not taken, as the loss "
                f"or a gradient was not finite, so their times say nothing; use train.precision bf16 or fp32, or other "
                f"data"
            )
        return merged


def first_batches(case: Case, dataset: DataSet, strategy: ParallelModel) -> Iterator[Batch]:
    """A rank's share of the first batches: some, and all of a cycle."""
    count = max(MEMORY_STEPS, averaging_cycle(named_config(case.config, case.strategy)))
    for indices in islice(cycle(full_batches(case.config, dataset)), count):
        yield read_share(dataset.train, indices, strategy.batch_share())


class RunnerApart:
    """One case on rank 0 alone, in a process of its own that has the cores of all ranks of its machine."""

    def __init__(self, world: World, case: Case, lead_in: bool) -> None:
        self.world = world
        load_data(world, case.config)  # one download serves all
        machines = all_gather_objects((platform.node(), local_cores()))
        cores = set().union(*(cores for machine, cores in machines if machine == machines[0][0]))
        self.apart = Apart(cores, Runner, World(), case, lead_in) if world.is_main else None
        hosts_meet(world.device)

    def step(self, round_: int, timed: bool) -> None:
        hosts_meet(self.world.device)
        if self.apart is not None:
            self.apart.call("step", round_, timed)

    def result(self) -> Timing:
        timing: Timing | None = None
        if self.apart is not None:
            timing = self.apart.call("result")
            self.apart.end()
        first: Timing = all_gather_objects(timing)[0]
        return first


def make_runners(world: World, cases: list[Case], peaks: "Peaks") -> list[Runner | RunnerApart]:
    models = Models()
    on_cores = world.device.type == "cpu" and world.size > 1
    engines = [STRATEGIES[named_config(case.config, case.strategy).parallel.data] for case in cases]
    lead_in = any(engine.leaves_in_flight for engine in engines)  # for all cases, or they could not be compared
    return [
        RunnerApart(world, case, lead_in)
        if case.all_cores and on_cores
        else Runner(world, case, lead_in, peaks, models)
        for case in cases
    ]


class Models:
    """A case's model as `build_model` gives it, once for all cases in a row that share it: random weights take long."""

    def __init__(self) -> None:
        self._last: tuple[tuple[object, ...], nn.Module] | None = None

    def of(self, config: Config, spec: DataSpec) -> nn.Module:
        asked = (config.model, spec, config.train.seed)
        if self._last is None or self._last[0] != asked:
            self._last = asked, build_model(config.model, spec, config.train.seed)
        return self._last[1]


class Peaks:
    """What a rank can reach at best, found once for all cases of a kind, so that they can be compared."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], tuple[float, str]] = {}

    def of(self, world: World, precision: str) -> tuple[float, str]:
        key = (world.size, precision)
        if key not in self._found:
            self._found[key] = peak_flops(world, precision)
        return self._found[key]


def new_timing(
    world: World, case: Case, strategy: ParallelModel, dataset: DataSet, memory: Memory, peak: tuple[float, str]
) -> Timing:
    config, batch = case.config, case.config.train.batch_size
    return Timing(
        label=case.label,
        strategy=case.strategy,
        parameters=strategy.parameters,
        batch_size=batch,
        flops_per_step=batch * strategy.flops_per_sample,
        ranks=world.size,
        ranks_on_device=world.ranks_on_device,
        device=world.device.type,
        threads=torch.get_num_threads(),
        cores={(platform.node(), core) for core in local_cores()},
        accumulation=config.train.accumulation,
        tokens_per_sample=dataset.spec.shape[0] if dataset.spec.kind == "tokens" else 0,
        peak_flops=peak[0] * world.size,
        peak_source=peak[1],
        theory=theory_of(named_config(config, case.strategy), dataset.spec, world.size),
        memory=memory,
        details=dict(case.details),
    )
