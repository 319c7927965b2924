"""What the figures of `bench comm` mean: peak, latency, links that compare, and the cost of a model's gradients."""

import math
from dataclasses import dataclass
from itertools import pairwise

from lockstep.bench.comm import Row
from lockstep.bench.presets import CNN_SIZES, IMAGES, tokens_for
from lockstep.bench.trial import Candidate
from lockstep.comm.algorithms import ALGORITHMS
from lockstep.comm.cost import Prices, Sample, fit
from lockstep.config import CNN, GPT, Model
from lockstep.data import DataSpec
from lockstep.models import on_meta, parameter_count, training_flops
from lockstep.words import counted, duration

LINKS = (  # one direction, 1e9 B/s
    ("1 GbE", 0.125),
    ("10 GbE", 1.25),
    ("25 GbE", 3.125),
    ("InfiniBand FDR (56 Gbit/s)", 7.0),
    ("100 GbE or InfiniBand EDR", 12.5),
    ("InfiniBand HDR (200 Gbit/s)", 25.0),
    ("PCIe 4.0 x16", 31.5),
    ("InfiniBand NDR (400 Gbit/s)", 50.0),
    ("PCIe 5.0 x16", 63.0),
    ("NVLink 3 (A100)", 300.0),
    ("NVLink 4 (H100)", 450.0),
    ("NVLink 5 (B200)", 900.0),
)

GRADIENT_BYTES = 4
UTILISATION = 0.4
"""Of the peak rate, by a step's computation."""


@dataclass
class Curve:
    """One collective by one candidate over all sizes."""

    collective: str
    candidate: Candidate
    rows: list[Row]

    @property
    def peak(self) -> Row:
        return max(self.rows, key=lambda r: r.busbw)

    @property
    def half_peak_bytes(self) -> float:
        """The size at which half the peak is reached, between the measured ones."""
        half = self.peak.busbw / 2
        if self.rows[0].busbw >= half:
            return self.rows[0].nbytes
        for low, high in pairwise(self.rows):
            if low.busbw < half <= high.busbw:
                share = (half - low.busbw) / (high.busbw - low.busbw)
                return float(low.nbytes * (high.nbytes / low.nbytes) ** share)
        return self.rows[-1].nbytes

    def busbw_at(self, nbytes: float) -> float:
        """1e9 B/s, between the measured sizes; outside them, the nearest one's."""
        if nbytes <= self.rows[0].nbytes:
            return self.rows[0].busbw
        for low, high in pairwise(self.rows):
            if nbytes <= high.nbytes:
                share = math.log(nbytes / low.nbytes) / math.log(high.nbytes / low.nbytes)
                return low.busbw + share * (high.busbw - low.busbw)
        return self.rows[-1].busbw


def curves(rows: list[Row]) -> list[Curve]:
    found: dict[tuple[str, Candidate], list[Row]] = {}
    for row in rows:
        found.setdefault((row.collective, row.candidate), []).append(row)
    return [Curve(*key, sorted(value, key=lambda r: r.nbytes)) for key, value in found.items()]


def sentences(curve: Curve) -> list[str]:
    peak, first = curve.peak, min(curve.rows, key=lambda r: r.p50)
    said = [
        f"{curve.collective} by {curve.candidate.name} on {counted(peak.ranks, 'rank')}: peak bus bandwidth "
        f"{peak.busbw:.3g} GB/s at {human(peak.nbytes)}; "
        f"latency floor {duration(first.p50)} at {human(first.nbytes)}"
    ]
    if len(curve.rows) > 2:
        said[0] += f"; half the peak is reached at {human(curve.half_peak_bytes)}"
    said[0] += "."
    slower = [name for name, rate in LINKS if rate <= peak.busbw]
    faster = [(name, rate) for name, rate in LINKS if rate > peak.busbw]
    if not slower:
        name, rate = faster[0]
        said.append(f"That is {peak.busbw / rate:.0%} of what {name} carries ({rate:g} GB/s).")
    elif not faster:
        said.append(f"That is beyond {slower[-1]}.")
    else:
        name, rate = faster[0]
        said.append(f"That is more than {slower[-1]} carries, and {peak.busbw / rate:.0%} of {name} ({rate:g} GB/s).")
    return said


@dataclass(frozen=True)
class Workload:
    """A model in training, as one rank sees it."""

    name: str
    parameters: int
    samples: int
    """That a rank takes per step."""
    flops: int
    """Of one sample's forward and backward pass; 0: not known."""

    @classmethod
    def of(cls, name: str, model: Model, spec: DataSpec, samples: int) -> "Workload":
        built = on_meta(model, spec)
        return cls(name, parameter_count(built), samples, training_flops(built, spec))


def usual_workloads() -> list[Workload]:
    """Models that people know, to compare with."""
    cnns = [
        Workload.of(f"CNN, {size}", CNN(channels=channels, hidden=hidden), IMAGES, 64)
        for size, (channels, hidden) in CNN_SIZES["linear"].items()
    ]
    xl = GPT(size="xl", context=1024, vocabulary=50_257)
    larger = GPT(d_model=4096, layers=32, heads=32, context=2048, vocabulary=32_000)
    gpts = [("GPT-2 xl, 1.6B", xl, 2), ("GPT, 6.7B", larger, 1)]
    return cnns + [Workload.of(name, gpt, tokens_for(gpt), samples) for name, gpt, samples in gpts]


@dataclass
class GradientCost:
    """What a model's gradients cost on the measured link, per step."""

    workload: Workload
    communication: float
    """Seconds: 2(n-1)/n of the gradients' bytes over the bus bandwidth measured at that size."""
    computation: float
    """Seconds: the samples' FLOP, at the stated share of the peak; NaN where those are not known."""

    @property
    def share(self) -> float:
        return self.communication / (self.communication + self.computation)


def gradient_costs(curve: Curve, peak_flops: float, workloads: list[Workload]) -> list[GradientCost]:
    """`curve` is an all-reduce's. Nothing overlaps here: this is what overlap has to hide."""
    n = curve.rows[0].ranks
    costs = []
    for workload in workloads:
        nbytes = GRADIENT_BYTES * workload.parameters
        seconds = 2 * (n - 1) / n * nbytes / (curve.busbw_at(nbytes) * 1e9)
        flops = workload.flops * workload.samples or math.nan
        costs.append(GradientCost(workload, seconds, flops / (UTILISATION * peak_flops)))
    return costs


# ---- the cost model against what was measured -----------------------------------------------------------------


@dataclass
class Prediction:
    """What the cost model says of one measurement."""

    algorithm: str
    nbytes: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def fit_rows(rows: list[Row], ranks_per_node: int) -> tuple[Prices, list[Prediction]] | None:
    """Fit the model to the all-reduces by hand among the rows; None if there are fewer than two algorithms."""
    by_hand = [r for r in rows if r.collective == "all_reduce" and r.candidate.algorithm in ALGORITHMS]
    if len({r.candidate.algorithm for r in by_hand}) < 2:
        return None
    samples = [Sample(r.candidate.algorithm, r.ranks, r.nbytes, r.p50, ranks_per_node) for r in by_hand]
    prices = fit(samples)
    predictions = [
        Prediction(s.algorithm, s.nbytes, s.seconds, prices.predict(s.algorithm, s.ranks, s.nbytes, s.ranks_per_node))
        for s in samples
    ]
    return prices, predictions


def human(nbytes: float) -> str:
    """1536 -> 1.5 KiB"""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"
