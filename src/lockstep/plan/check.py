"""How far predictions are from what others measured, by source; beside a predictor that knows one number per GPU."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import mean, median
from typing import Any

from lockstep.plan.memory import Memory, memory_of, verdict
from lockstep.plan.published import Row
from lockstep.plan.step import StepTime, step_time

SWEEP = ("model", "gpu", "gpus", "global_batch", "seq", "precision")
"""Rows of one source that agree in these differ in their layout: a user would have had to choose among them."""


@dataclass
class Judged:
    """A published result beside its prediction."""

    row: Row
    time: StepTime | None = None
    memory: Memory | None = None
    fits: str = ""

    @property
    def error(self) -> float | None:
        """log(predicted / measured)."""
        if self.time is None or self.row.measured_s is None or not self.row.feasible:
            return None
        return log(self.time.seconds / self.row.measured_s)

    def cells(self) -> dict[str, Any]:
        """The row's own columns, and ours."""
        return {
            **self.row.cells,
            "predicted_step_s": float(f"{self.time.seconds:.5g}") if self.time is not None else "",
            "predicted_peak_gib": round(self.memory.gib, 2) if self.memory is not None else "",
            "fits": self.fits or f"cannot be predicted: {self.row.reason}",
        }


def judge(row: Row) -> Judged:
    if row.setting is None:
        return Judged(row)
    try:
        found, seconds = memory_of(row.setting), step_time(row.setting)
    except (ArithmeticError, ValueError) as error:  # a layout that cannot have been run
        row.setting, row.reason = None, f"its numbers do not go together ({error})"
        return Judged(row)
    fits = verdict(found, row.setting.machine.memory_gib)
    if fits == "does not fit" and not row.cells.get("recompute"):
        fits = "not known: it does not say recompute, and without it would not fit"
    return Judged(row, seconds, found, fits)


@dataclass
class SourceError:
    """Of the rows of one source."""

    source: str
    rows: int
    mean: float
    median: float
    worst: float
    bias: float
    """Of the mean of the logarithms: above 0 where predictions are too long."""
    simple: float
    """Mean error of the predictor that knows one efficiency per GPU kind and type."""
    regret: float | None
    """How much slower the layout was that we would have chosen than the best of its sweep; the mean over sweeps."""
    sweeps: int = 0
    memory: float | None = None
    """Mean error of the peak memory, where it is published."""
    worst_row: str = ""


def errors_by_source(judged: Sequence[Judged]) -> list[SourceError]:
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.error is not None:
            groups[one.row.source].append(one)
    simple = one_constant([one for group in groups.values() for one in group])
    found = [source_error(source, group, simple) for source, group in groups.items()]
    return sorted(found, key=lambda e: -e.rows)


def source_error(source: str, group: list[Judged], simple: Callable[[Judged], float]) -> SourceError:
    errors = [one.error for one in group if one.error is not None]
    sizes = [abs(exp(e) - 1) for e in errors]
    plain = [abs(simple(one) / (one.row.measured_s or 1.0) - 1) for one in group]
    remembered = [one for one in group if one.memory is not None and one.row.measured_gib]
    memory = [abs(one.memory.gib / (one.row.measured_gib or 1.0) - 1) for one in remembered if one.memory is not None]
    lost = regrets(group)
    worst = group[sizes.index(max(sizes))].row.cells
    return SourceError(
        *(source, len(group), mean(sizes), median(sizes), max(sizes), exp(mean(errors)) - 1, mean(plain)),
        regret=mean(lost) if lost else None,
        sweeps=len(lost),
        memory=mean(memory) if memory else None,
        worst_row=f"{worst['model']} on {worst['gpus']} {worst['gpu']}",
    )


def regrets(group: Sequence[Judged]) -> list[float]:
    sweeps: dict[tuple[str, ...], list[Judged]] = defaultdict(list)
    for one in group:
        sweeps[one.row.cells["source"], *(one.row.cells.get(name, "") for name in SWEEP)].append(one)
    found = []
    for rows in sweeps.values():
        if len({str(one.row.setting.layout) for one in rows if one.row.setting is not None}) < 2:
            continue
        chosen = min(rows, key=lambda one: one.time.seconds if one.time is not None else 0.0)
        best = min(one.row.measured_s or 0.0 for one in rows)
        found.append((chosen.row.measured_s or 0.0) / best - 1)
    return found


def one_constant(judged: Sequence[Judged]) -> Callable[[Judged], float]:
    """FLOP over peak, by the median efficiency of its GPU kind and type."""

    def ideal(one: Judged) -> float:
        setting = one.row.setting
        assert setting is not None
        tokens = setting.layout.global_batch * setting.network.context
        rate = setting.machine.peak(setting.precision) * setting.layout.ranks
        return tokens * setting.network.flops_per_token() / rate

    kinds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in judged:
        setting = one.row.setting
        assert setting is not None
        kinds[setting.machine.name, setting.precision].append(ideal(one) / (one.row.measured_s or 1.0))
    shares = {kind: median(values) for kind, values in kinds.items()}

    def predict(one: Judged) -> float:
        setting = one.row.setting
        assert setting is not None
        return ideal(one) / shares[setting.machine.name, setting.precision]

    return predict


@dataclass
class Summary:
    """How far predictions were, over some results."""

    rows: int
    predicted: int
    judged: int
    mean: float
    median: float
    bias: float
    memory: float | None
    wrongly_fits: list[str] = field(default_factory=list)
    """Rows that ran out of memory and are said to fit."""
    wrongly_full: int = 0
    """Rows that ran and are said not to fit."""
    ran: int = 0


def summary(judged: Sequence[Judged]) -> Summary:
    errors = [one.error for one in judged if one.error is not None]
    sizes = [abs(exp(e) - 1) for e in errors] or [0.0]
    memory = [
        abs(one.memory.gib / one.row.measured_gib - 1)
        for one in judged
        if one.memory is not None and one.row.measured_gib
    ]
    wrong = [
        f"{one.row.cells['model']} on {one.row.cells['gpus']} {one.row.cells['gpu']}"
        for one in judged
        if not one.row.feasible and one.fits == "fits"
    ]
    predicted = sum(one.time is not None for one in judged)
    bias = exp(mean(errors)) - 1 if errors else 0.0
    return Summary(
        *(len(judged), predicted, len(errors), mean(sizes), median(sizes), bias),
        memory=mean(memory) if memory else None,
        wrongly_fits=wrong,
        wrongly_full=sum(one.row.feasible and one.fits == "does not fit" for one in judged),
        ran=sum(one.row.feasible and one.time is not None for one in judged),
    )
