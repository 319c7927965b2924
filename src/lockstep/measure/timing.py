"""What the steps of one case cost: the numbers behind a row of `bench train`."""

from dataclasses import dataclass, field
from math import nan
from statistics import mean, median
from typing import Any

from lockstep.comm.ledger import Ledger, Traffic
from lockstep.measure.breakdown import step_breakdown
from lockstep.measure.memory import Memory
from lockstep.measure.statistics import Estimate, estimate, percentiles
from lockstep.parallel.law import Sent
from lockstep.strategies.step import Phases


@dataclass
class Timing:
    """The steps of one strategy on one config."""

    label: str
    """What the row is called; the strategy, unless a preset says more."""
    strategy: str
    parameters: int
    batch_size: int
    flops_per_step: float
    """Of the whole global batch: matrix products, forward and backward."""
    ranks: int = 1
    ranks_on_device: int = 1
    """That share one GPU."""
    device: str = "cpu"
    threads: int = 1
    """That a rank computes with, on a CPU."""
    cores: set[tuple[str, int]] = field(default_factory=set)
    """Machine and number of each core that some rank may use."""
    tokens_per_sample: int = 0
    """0: samples are not sequences."""
    peak_flops: float = 0.0
    """Of all ranks together."""
    peak_source: str = ""
    theory: Sent | None = None
    memory: Memory = field(default_factory=Memory)
    """Of the rank that holds most."""
    details: dict[str, Any] = field(default_factory=dict)
    """What distinguishes the case from others: bucket_mb, d_model, ..."""
    step_s: list[float] = field(default_factory=list)
    """Of the slowest rank."""
    exposed_s: list[float] = field(default_factory=list)
    """Waited for communication; mean over the ranks."""
    comm_s: list[float] = field(default_factory=list)
    """Some communication was in flight; mean over the ranks. Empty where ends cannot be seen."""
    optimizer_s: list[float] = field(default_factory=list)
    """In the optimizer, without its waits; mean over the ranks."""
    imbalance_s: list[float] = field(default_factory=list)
    """By how much the slowest rank computed longer than the mean."""
    traffic: list[Traffic] = field(default_factory=list)
    accumulation: int = 1
    in_turns: bool = True
    """With the others, round by round; else their times cannot be paired."""
    cycle: int = 1
    """Steps after which all has happened that happens in some steps only; each counts as the mean of its cycle."""
    skipped: int = 0
    """Steps whose loss or gradients were not finite."""
    timelines: list[dict[str, Any]] = field(default_factory=list)
    """To be drawn: of each step, then of each rank's median step (`merge_ranks`)."""

    def record(self, seconds: float, ledger: Ledger, phases: Phases, skipped: bool = False) -> None:
        """Note one step, as this rank saw it."""
        self.step_s.append(seconds)
        self.optimizer_s.append(step_breakdown(phases, ledger)["optimizer_ms"] / 1e3)
        self.skipped += skipped
        if skipped:
            self.theory = None  # it is about steps that are taken
        self.exposed_s.append(ledger.exposed_seconds())
        self.traffic.append(ledger.traffic())
        busy = ledger.busy_seconds()
        if busy is not None:
            self.comm_s.append(busy)

    # ---- time --------------------------------------------------------------------------------------------------

    @property
    def median_ms(self) -> float:
        return 1e3 * median(self.step_s)

    @property
    def spread_ms(self) -> tuple[float, float]:
        """10th and 90th percentile."""
        low, high = percentiles(self.step_s)
        return 1e3 * low, 1e3 * high

    @property
    def confidence_ms(self) -> Estimate:
        """The median with its 95% interval."""
        return estimate(once_per_cycle([1e3 * s for s in self.step_s], self.cycle))

    def ratio_to(self, other: "Timing") -> Estimate:
        """Median over the rounds of this step's time over the other's in the same round."""
        if not self.in_turns:
            return Estimate(median(self.step_s) / median(other.step_s))
        ratios = [mine / theirs for mine, theirs in zip(self.step_s, other.step_s, strict=True)]
        return estimate(once_per_cycle(ratios, max(self.cycle, other.cycle)))

    @property
    def samples_per_s(self) -> float:
        return self.batch_size / median(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        return self.samples_per_s * self.tokens_per_sample

    @property
    def flops_per_s(self) -> float:
        return self.flops_per_step / median(self.step_s)

    @property
    def mfu(self) -> float:
        return self.flops_per_s / self.peak_flops if self.peak_flops else nan

    # ---- communication -----------------------------------------------------------------------------------------

    @property
    def exposed_ms(self) -> float:
        return 1e3 * median(self.exposed_s)

    @property
    def exposed_share(self) -> float:
        return min(1.0, self.exposed_ms / self.median_ms)

    @property
    def compute_ms(self) -> float:
        """What is left of a step when it does not wait."""
        return max(0.0, self.median_ms - self.exposed_ms)

    @property
    def optimizer_ms(self) -> float:
        """The part of computation that is the optimizer's."""
        return 1e3 * median(self.optimizer_s) if self.optimizer_s else nan

    @property
    def comm_ms(self) -> float:
        return 1e3 * median(self.comm_s) if self.comm_s else nan

    @property
    def hidden_share(self) -> float:
        """Of the communication, how much went on beside computation."""
        return max(0.0, 1 - self.exposed_ms / self.comm_ms) if self.comm_s and self.comm_ms else nan

    @property
    def collectives(self) -> float:
        """Per step, on average: local SGD sends something in some steps only."""
        return mean(t.collectives for t in self.traffic)

    @property
    def wire_mb(self) -> float:
        """MB that a rank sends per step, on average."""
        return mean(t.wire_bytes for t in self.traffic) / 1e6

    @property
    def axis_mb(self) -> dict[str, float]:
        """The parts of it along axes that cut the model."""
        axes = {axis for t in self.traffic for axis in t.axis_bytes}
        return {axis: mean(t.axis_bytes.get(axis, 0.0) for t in self.traffic) / 1e6 for axis in axes}

    @property
    def parameters_mb(self) -> float:
        """The part of it that carries parameters."""
        return mean(t.parameter_bytes for t in self.traffic) / 1e6

    @property
    def theory_mb(self) -> float:
        return self.theory.wire_bytes / 1e6 if self.theory is not None else nan

    @property
    def imbalance_ms(self) -> float:
        return 1e3 * median(self.imbalance_s) if self.imbalance_s else 0.0


def merge_ranks(everyone: list[Timing], cycle: int = 1) -> Timing:
    """Per step, the time of the rank that took longest; communication as the mean over the ranks.

    `cycle`: only every so many-th step communicates; then each step counts as the mean of its cycle.
    """
    merged = everyone[0]
    merged.cycle = cycle
    middle = median_step([t.step_s for t in everyone])
    merged.timelines = [t.timelines[middle] for t in everyone if t.timelines]
    compute = [[s - e for s, e in zip(t.step_s, t.exposed_s, strict=True)] for t in everyone]
    merged.imbalance_s = [max(step) - mean(step) for step in zip(*compute, strict=True)]
    merged.step_s = [max(times) for times in zip(*(t.step_s for t in everyone), strict=True)]
    merged.exposed_s = [mean(times) for times in zip(*(t.exposed_s for t in everyone), strict=True)]
    merged.comm_s = [mean(times) for times in zip(*(t.comm_s for t in everyone), strict=True)]
    merged.optimizer_s = [mean(times) for times in zip(*(t.optimizer_s for t in everyone), strict=True)]
    for values in (merged.step_s, merged.exposed_s, merged.comm_s, merged.optimizer_s, merged.imbalance_s):
        values[:] = over_cycles(values, cycle)
    merged.cores = set().union(*(t.cores for t in everyone))
    merged.memory = max((t.memory for t in everyone), key=lambda memory: memory.peak_mib)
    return merged


def median_step(times: list[list[float]]) -> int:
    """The number of the step that took the median time; `times`: of each rank's steps, of which the slowest counts."""
    slowest = [max(step) for step in zip(*times, strict=True)]
    return sorted(range(len(slowest)), key=slowest.__getitem__)[len(slowest) // 2]


def over_cycles(values: list[float], cycle: int) -> list[float]:
    """Each value replaced by the mean of its cycle; a last one that is not whole joins the one before."""
    if cycle == 1 or not values:
        return values
    starts = list(range(0, max(1, len(values) - cycle + 1), cycle))
    ends = [*starts[1:], len(values)]
    return [mean(values[a:b]) for a, b in zip(starts, ends, strict=True) for _ in range(a, b)]


def once_per_cycle(values: list[float], cycle: int) -> list[float]:
    """The mean of each cycle, once: that many values are independent."""
    return over_cycles(values, cycle)[: cycle * max(1, len(values) // cycle) : cycle]


def same_work(a: Timing, b: Timing) -> bool:
    """The same model and the same global batch: their times can be compared."""
    return (a.parameters, a.batch_size, a.flops_per_step) == (b.parameters, b.batch_size, b.flops_per_step)


def baselines_among(timings: list[Timing]) -> list[Timing]:
    """Those of one process."""
    return [t for t in timings if t.strategy == "single"]


def baseline_of(timing: Timing, baselines: list[Timing]) -> Timing | None:
    """One process that does what this case does, if it was timed."""
    return next((b for b in baselines if same_work(timing, b)), None)


def as_rows(timings: list[Timing], baselines: list[Timing]) -> list[dict[str, Any]]:
    """`baselines`: what speed-ups refer to."""
    return [as_row(t, timings[0], baseline_of(t, baselines)) for t in timings]


def as_row(timing: Timing, first: Timing, single: Timing | None) -> dict[str, Any]:
    """Every number of a row by its name, for CSV and JSON. `first`: what ratios refer to; `single`: one process."""
    sure, memory = timing.confidence_ms, timing.memory
    ratio = timing.ratio_to(first) if same_work(timing, first) else Estimate(nan)
    low, high = timing.spread_ms
    return {
        "label": timing.label,
        "strategy": timing.strategy,
        "ranks": timing.ranks,
        "parameters": timing.parameters,
        "batch_size": timing.batch_size,
        "step_ms": sure.value,
        "p10_ms": low,
        "p90_ms": high,
        "low95_ms": sure.low,
        "high95_ms": sure.high,
        "ratio": ratio.value,
        "ratio_low95": ratio.low,
        "ratio_high95": ratio.high,
        "samples_per_s": timing.samples_per_s,
        "tokens_per_s": timing.tokens_per_s if timing.tokens_per_sample else None,
        "tflop_per_s": timing.flops_per_s / 1e12,
        "mfu": timing.mfu,
        "peak_tflop_per_s": timing.peak_flops / 1e12,
        "speedup": single.median_ms / timing.median_ms if single is not None else nan,
        "compute_ms": timing.compute_ms,
        "forward_backward_ms": timing.compute_ms - timing.optimizer_ms,
        "optimizer_ms": timing.optimizer_ms,
        "exposed_ms": timing.exposed_ms,
        "exposed_fraction": timing.exposed_share,
        "comm_ms": timing.comm_ms,
        "hidden_fraction": timing.hidden_share,
        "imbalance_ms": timing.imbalance_ms,
        "collectives": timing.collectives,
        "theory_collectives": timing.theory.collectives if timing.theory else None,
        "wire_mb": timing.wire_mb,
        "theory_mb": timing.theory_mb,
        "peak_mib": memory.peak_mib,
        "parameters_mib": memory.parameters_mib,
        "gradients_mib": memory.gradients_mib,
        "optimizer_mib": memory.optimizer_mib,
        "activations_mib": memory.activations_mib,
        "other_mib": memory.other_mib,
        **timing.details,
    }
