"""Step times as a picture."""

from pathlib import Path

from lockstep.bench.train import Timing
from lockstep.errors import UserError


def plot_timings(timings: list[Timing], file: Path) -> None:
    """One bar per strategy: the median step, split into work and exposed communication, with p10 and p90."""
    from matplotlib.figure import Figure  # slow to import, and needed here only

    figure = Figure(figsize=(7, 0.5 * len(timings) + 1.6), layout="constrained")
    axes = figure.subplots()
    names = [t.strategy for t in timings]
    medians = [t.median_ms for t in timings]
    exposed = [t.exposed_share * t.median_ms for t in timings]
    work = [m - e for m, e in zip(medians, exposed, strict=True)]
    axes.barh(names, work, label="compute and hidden communication", color="#4c78a8")
    axes.barh(names, exposed, left=work, label="exposed communication", color="#f58518")
    below = [m - t.spread_ms[0] for m, t in zip(medians, timings, strict=True)]
    above = [t.spread_ms[1] - m for m, t in zip(medians, timings, strict=True)]
    errors = [[max(0.0, b) for b in below], [max(0.0, a) for a in above]]
    axes.errorbar(medians, names, xerr=errors, fmt="none", ecolor="#333333", capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("step time, ms (median; whiskers p10 and p90)")
    axes.set_title(f"{timings[0].parameters:,} parameters, global batch {timings[0].batch_size}", loc="left")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    try:
        figure.savefig(file, dpi=150)
    except ValueError as error:
        raise UserError(f"--plot {file}: {error}") from None
