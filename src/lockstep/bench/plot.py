"""Benchmarks as pictures."""

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.bench.comm_reading import Curve, human
from lockstep.bench.scaling import Point, amdahl_fit, amdahl_speedup
from lockstep.errors import UserError
from lockstep.measure.timing import Timing
from lockstep.words import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_timings(timings: list[Timing], file: Path) -> None:
    """One bar per strategy: the median step, split into work and exposed communication, with p10 and p90."""
    from matplotlib.figure import Figure  # slow to import, and needed here only

    figure = Figure(figsize=(7, 0.5 * len(timings) + 1.6), layout="constrained")
    axes = figure.subplots()
    names = [t.label for t in timings]
    medians = [t.median_ms for t in timings]
    exposed = [t.exposed_ms if t.traffic_is_seen else 0.0 for t in timings]
    work = [m - e for m, e in zip(medians, exposed, strict=True)]
    axes.barh(names, work, label="compute and hidden communication", color="#4c78a8")
    axes.barh(names, exposed, left=work, label="exposed communication", color="#f58518")
    below = [m - t.spread_ms[0] for m, t in zip(medians, timings, strict=True)]
    above = [t.spread_ms[1] - m for m, t in zip(medians, timings, strict=True)]
    errors = [[max(0.0, b) for b in below], [max(0.0, a) for a in above]]
    axes.errorbar(medians, names, xerr=errors, fmt="none", ecolor="#333333", capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("step time, ms (median; whiskers p10 and p90)")
    if all((t.parameters, t.batch_size) == (timings[0].parameters, timings[0].batch_size) for t in timings):
        axes.set_title(f"{timings[0].parameters:,} parameters, global batch {timings[0].batch_size}", loc="left")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    _save(figure, file)


def plot_scaling(found: list[Point], file: Path, slots: int) -> None:
    """Speed-up of each mode beside the ideal and Amdahl's law; a line where ranks begin to share cores."""
    from matplotlib.figure import Figure  # slow to import, and needed here only

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = sorted({p.ranks for p in found})
    left.plot(sizes, sizes, color="#999999", linestyle="--", label="ideal")
    for mode, marker in (("strong", "o"), ("weak", "s")):
        mine = [p for p in found if p.mode == mode]
        if mine:
            left.plot([p.ranks for p in mine], [p.speedup for p in mine], marker=marker, label=mode)
            right.plot([p.ranks for p in mine], [100 * p.efficiency for p in mine], marker=marker, label=mode)
    serial = amdahl_fit([p for p in found if p.mode == "strong" and p.ranks <= slots])
    if serial is not None:
        law = [amdahl_speedup(serial, n) for n in sizes]
        left.plot(sizes, law, color="#e45756", linestyle=":", label=f"Amdahl, {serial:.1%} serial")
    for axes, label in ((left, "speed-up over one rank"), (right, "efficiency, %")):
        if slots < sizes[-1]:
            axes.axvline(slots, color="#bbbbbb", linewidth=1)
            axes.annotate(" ranks share cores", (slots, axes.get_ylim()[0]), color="#777777", va="bottom", fontsize=8)
        axes.set_xticks(sizes)
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    _save(figure, file)


def plot_curves(curves: list[Curve], file: Path) -> None:
    """Bus bandwidth and time over size, both axes logarithmic: one line per collective and candidate."""
    from matplotlib.figure import Figure  # slow to import, and needed here only
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    several = len({c.collective for c in curves}) > 1
    for number, curve in enumerate(curves):
        sizes = [r.nbytes for r in curve.rows]
        label = f"{curve.collective}, {curve.candidate.name}" if several else curve.candidate.name
        style = {"marker": "osD^vP*X"[number % 8], "markersize": 4, "color": f"C{number % 10}"}
        left.plot(sizes, [r.busbw for r in curve.rows], label=label, **style)
        right.plot(sizes, [1e6 * r.p50 for r in curve.rows], **style)
        right.fill_between(sizes, [1e6 * r.p50 for r in curve.rows], [1e6 * r.p99 for r in curve.rows], alpha=0.15)
    for axes, label in ((left, "bus bandwidth, GB/s"), (right, "time, us (p50; shaded up to p99)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: human(size)))
        axes.tick_params(axis="x", rotation=30)
        axes.set_xlabel("size")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    what = "collectives" if several else curves[0].collective
    figure.suptitle(f"{what}, {counted(curves[0].rows[0].ranks, 'rank')}", x=0.01, ha="left")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    _save(figure, file)


def _save(figure: "Figure", file: Path) -> None:
    try:
        figure.savefig(file, dpi=150)
    except ValueError as error:
        raise UserError(f"--plot {file}: {error}") from None
