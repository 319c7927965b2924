"""What `lockstep bench comm` shows and writes."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from lockstep.bench.comm import Row
from lockstep.bench.comm_reading import (
    UTILISATION,
    Workload,
    curves,
    fit_rows,
    gradient_costs,
    human,
    sentences,
    usual_workloads,
)
from lockstep.bench.pairs import Pairs
from lockstep.bench.trial import Sweep
from lockstep.cli.tables import new_table
from lockstep.config import Config
from lockstep.data import build_data
from lockstep.plan.trace import spec_without_data
from lockstep.results.record import Record
from lockstep.words import counted, duration


@dataclass
class Result:
    """What the ranks found."""

    rows: list[Row]
    pairs: Pairs | None
    backend: str
    device: str
    peak_flops: float
    peak_source: str
    ranks_per_node: int


def show_rows(screen: Console, rows: list[Row], sweep: Sweep, compared: bool) -> None:
    """Of one collective: one table over the sizes, or, of several candidates, one for each size."""
    how = f"{counted(rows[0].ranks, 'rank')}, {counted(sweep.iterations, 'iteration')} after {sweep.warmup}"
    if len({r.candidate for r in rows}) == 1:
        table = new_table(f"{rows[0].collective}, {how}", ("size",), ("count", "type", "redop", *MEASURED))
        for row in rows:
            table.add_row(human(row.nbytes), f"{row.count:,}", row.dtype, row.op, *measured(row))
        screen.print(table)
        return
    reference = rows[1 if compared else 0].candidate
    by_size: dict[int, list[Row]] = {}
    for row in rows:
        by_size.setdefault(row.nbytes, []).append(row)
    for nbytes, of_size in by_size.items():
        base = next(r.p50 for r in of_size if r.candidate == reference)
        title = f"{rows[0].collective} of {human(nbytes)} ({of_size[0].count:,} x {of_size[0].dtype}), {how}"
        table = new_table(title, ("by",), (*MEASURED, f"p50 ratio\nto {reference.name}"))
        best = min(r.p50 for r in of_size)
        for row in of_size:
            style = "bold" if row.p50 == best else None
            table.add_row(row.candidate.name, *measured(row), f"{row.p50 / base:.3f}", style=style)
        screen.print(table)
    if len(by_size) > 1:
        show_side_by_side(screen, by_size)


def show_side_by_side(screen: Console, by_size: dict[int, list[Row]]) -> None:
    """p50 of every candidate at every size."""
    first = next(iter(by_size.values()))
    names = [row.candidate.name for row in first]
    table = new_table(f"{first[0].collective}: p50, and the fastest", ("size",), tuple(names), ("fastest",))
    for nbytes, rows in by_size.items():
        best = min(rows, key=lambda r: r.p50)
        table.add_row(human(nbytes), *(duration(row.p50) for row in rows), best.candidate.name)
    screen.print(table)


MEASURED = ("time", "algbw\nGB/s", "busbw\nGB/s", "#wrong", "p50", "p99", "max", "slow\nrank")


def measured(row: Row) -> list[str]:
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    times = [duration(seconds) for seconds in (row.p50, row.p99, row.max)]
    return [duration(row.time), f"{row.algbw:.3f}", f"{row.busbw:.3f}", wrong, *times, str(row.slow_rank)]


def show_pairs(screen: Console, pairs: Pairs, backend: str) -> None:
    size = len(pairs.latency)
    screen.print("between each two ranks, one pair at a time: half a round trip of 8 B, and the rate of 4 MiB one way")
    for title, matrix, written in (
        (f"8 B ({backend})", pairs.latency, duration),
        (f"4 MiB, GB/s ({backend})", pairs.bandwidth, lambda rate: f"{rate / 1e9:.3f}"),
    ):
        table = new_table(title, ("rank",), tuple(str(r) for r in range(size)))
        for rank, line in enumerate(matrix):
            table.add_row(str(rank), *("-" if o == rank else written(v) for o, v in enumerate(line)))
        screen.print(table)


def show_fit(screen: Console, result: Result) -> None:
    fitted = fit_rows(result.rows, result.ranks_per_node)
    assert fitted is not None, "checked when the flags were read"
    prices, predictions = fitted
    table = new_table(
        "the cost model, fitted to these measurements",
        ("algorithm",),
        ("size", "measured", "predicted", "error\n%"),
    )
    for p in sorted(predictions, key=lambda p: (p.nbytes, p.measured)):
        found = (duration(p.measured), duration(p.predicted))
        table.add_row(p.algorithm, human(p.nbytes), *found, f"{100 * p.error:+.0f}")
    screen.print(table)
    errors = sorted(abs(p.error) for p in predictions)
    screen.print(
        f"On the busiest rank: {1e6 * prices.message:.1f} us per message, {1e12 * prices.byte_sent:.0f} us/MB sent, "
        f"{1e12 * prices.byte_added:.0f} us/MB added. On any rank: {1e6 * prices.any_message:.1f} us per message, "
        f"{1e12 * prices.any_byte:.0f} us/MB (0: these measurements do not separate it from the others).\n"
        f"Error {errors[len(errors) // 2]:.0%} in the median, {errors[-1]:.0%} at most."
    )
    for nbytes in dict.fromkeys(p.nbytes for p in predictions):
        of_size = [p for p in predictions if p.nbytes == nbytes]
        chosen, best = min(of_size, key=lambda p: p.predicted), min(of_size, key=lambda p: p.measured)
        lost = chosen.measured / best.measured - 1
        verdict = "which is the fastest" if chosen is best else f"{best.algorithm} is {lost:.0%} faster"
        screen.print(f"  {human(nbytes):>8}: auto takes {chosen.algorithm}, {verdict}")


COSTS = (
    *("gradients\nMB", "samples\n/rank/step", "FLOP\n/parameter"),
    *("communi-\ncation", "compu-\ntation", "share of\nstep %"),
)
SMALLEST_FOR_MODELS = 1024 * 1024
"""Smaller messages say nothing about bandwidth."""


def workload_of(config: Config, name: str, ranks: int) -> Workload:
    """A user's, with an equal share of its batch for each rank."""
    spec = build_data(config).spec if config.data.name == "own" else spec_without_data(config)
    return Workload.of(name, config.model, spec, max(1, config.train.batch_size // ranks))


def show_reading(screen: Console, result: Result, config: Config | None = None, name: str = "") -> None:
    """`config`: of a user's model, whose gradients stand first in the table; `name`: of it."""
    for curve in curves(result.rows):
        screen.print(" ".join(sentences(curve)))
    reduces = [c for c in curves(result.rows) if c.collective == "all_reduce"]
    if not reduces:
        return
    if max(row.nbytes for row in reduces[0].rows) < SMALLEST_FOR_MODELS:
        screen.print(
            f"For the cost of a model's gradients, measure all_reduce up to {human(SMALLEST_FOR_MODELS)} or more."
        )
        return
    best = max(reduces, key=lambda c: c.peak.busbw)
    table = new_table(
        f"fp32 gradients over this link, all_reduce by {best.candidate.name}",
        ("model",),
        COSTS,
    )
    asked = [] if config is None else [workload_of(config, name, best.rows[0].ranks)]
    for c in gradient_costs(best, result.peak_flops, asked + usual_workloads()):
        work = c.workload
        known = work.flops > 0
        table.add_row(
            work.name,
            f"{4e-6 * work.parameters:,.1f}",
            str(work.samples),
            f"{work.flops * work.samples / work.parameters:,.0f}" if known else "-",
            duration(c.communication),
            duration(c.computation) if known else "-",
            f"{100 * c.share:.1f}" if known else "-",
        )
    screen.print(table)
    screen.print(
        f"Communication: 2(n-1)/n S / busbw, nothing overlapped. Computation: the FLOP of a rank's samples at "
        f"{UTILISATION:.0%} of {result.peak_flops / 1e12:.3g} TFLOP/s per rank ({result.peak_source})."
    )


# ---- files --------------------------------------------------------------------------------------------------

CSV_COLUMNS = (
    *("collective", "backend", "algorithm", "ranks", "size_bytes", "count", "type", "redop"),
    *("time_us", "algbw_gbps", "busbw_gbps", "wrong", "p50_us", "p99_us", "max_us", "slow_rank"),
)


def figures(row: Row) -> dict[str, Any]:
    values = (
        *(row.collective, row.candidate.backend, row.candidate.algorithm, row.ranks),
        *(row.nbytes, row.count, row.dtype, row.op),
        *(round(1e6 * row.time, 3), float(f"{row.algbw:.6g}"), float(f"{row.busbw:.6g}"), row.wrong),
        *(*(round(1e6 * seconds, 3) for seconds in (row.p50, row.p99, row.max)), row.slow_rank),
    )
    return dict(zip(CSV_COLUMNS, values, strict=True))


def as_record(result: Result) -> Record:
    """The rows as in the CSV, with the seconds of every iteration of every rank; and the pairs."""
    rows = [{**figures(row), "seconds_by_rank": row.seconds} for row in result.rows]
    names, ranks = list(dict.fromkeys(row.collective for row in result.rows)), [row.ranks for row in result.rows]
    pairs = None
    if result.pairs is not None:
        pairs = {"latency_s": result.pairs.latency, "bandwidth_bytes_per_s": result.pairs.bandwidth}
        names, ranks = [*names, "pairs"], [*ranks, len(result.pairs.latency)]
    document = {"device": result.device, "backend": result.backend, "rows": rows, "pairs": pairs}
    what = ", ".join(names) if len(names) < 4 else f"{len(names)} collectives"
    return Record("bench comm", document, title=f"{what} on {result.backend}, {counted(max(ranks), 'rank')}")
