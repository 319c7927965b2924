"""From a record to what a page shows of it: sentences, tables and charts, as plain data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import UserError
from lockstep.results.record import Record
from lockstep.words import counted

Rows = list[dict[str, Any]]
Chart = dict[str, Any]


@dataclass
class Table:
    """Columns are (key in the rows, heading with its unit)."""

    name: str
    """Of its CSV file."""
    caption: str
    columns: list[tuple[str, str]]
    rows: Rows


@dataclass
class Section:
    kind: str
    title: str
    record: Record
    sentences: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    """Drawn by assets/charts.js: `type` is bars, lines or timeline."""


def section(record: Record) -> Section:
    made = Section(record.kind, record.title or record.kind, record)
    try:
        FILLERS.get(record.kind, _anything)(made, record.result)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"the result {made.title!r} of {record.kind} is not whole ({error!r}); run it again") from None
    return made


# ---- bench train and demo ------------------------------------------------------------------------------------------

TIME_COLUMNS = [
    ("label", "strategy"),
    ("link", "network"),
    ("step_ms", "step, ms (median)"),
    ("p10_ms", "p10, ms"),
    ("p90_ms", "p90, ms"),
    ("ratio", "ratio to the first"),
    ("ratio_low95", "95% from"),
    ("ratio_high95", "95% to"),
    ("samples_per_s", "samples/s"),
    ("tokens_per_s", "tokens/s"),
    ("tflop_per_s", "TFLOP/s"),
    ("mfu", "MFU"),
    ("speedup", "speed-up over one process"),
    ("accuracy", "test accuracy"),
    ("difference", "Δ weights to one process"),
]
COMMUNICATION_COLUMNS = [
    ("label", "strategy"),
    ("link", "network"),
    ("compute_ms", "compute, ms"),
    ("exposed_ms", "exposed, ms"),
    ("exposed_fraction", "exposed, share"),
    ("comm_ms", "total, ms"),
    ("hidden_fraction", "hidden, share"),
    ("collectives", "collectives/step"),
    ("theory_collectives", "by theory"),
    ("wire_mb", "MB sent/step"),
    ("theory_mb", "MB by theory"),
    ("predicted_fraction_1gbit", "waiting at 1 Gbit/s, predicted share"),
    ("predicted_fraction_10gbit", "at 10 Gbit/s, predicted share"),
    ("predicted_fraction_25gbit", "at 25 Gbit/s, predicted share"),
]
MEMORY_COLUMNS = [
    ("label", "strategy"),
    ("parameters_mib", "parameters, MiB"),
    ("gradients_mib", "gradients, MiB"),
    ("optimizer_mib", "optimizer state, MiB"),
    ("activations_mib", "activations and temporaries, MiB"),
    ("other_mib", "buffers and other, MiB"),
    ("peak_mib", "peak, MiB"),
]


def _bench_train(made: Section, result: dict[str, Any]) -> None:
    rows: Rows = result["rows"]
    labels = [row["label"] + (f" ({row['link']})" if row.get("link") not in (None, "none") else "") for row in rows]
    made.sentences += result.get("sentences", [])
    made.tables += [
        Table("time", "Time of a step", _present(TIME_COLUMNS, rows), rows),
        Table("communication", "Communication, per rank and step", _present(COMMUNICATION_COLUMNS, rows), rows),
        Table("memory", "Memory of the rank that holds most", _present(MEMORY_COLUMNS, rows), rows),
    ]
    rate = "tokens_per_s" if any(row.get("tokens_per_s") for row in rows) else "samples_per_s"
    made.charts += [
        bars(
            "Step time",
            "ms, median; whiskers p10 and p90",
            labels,
            [("compute", _column(rows, "compute_ms")), ("exposed communication", _column(rows, "exposed_ms"))],
            whiskers=[[row.get("p10_ms"), row.get("p90_ms")] for row in rows],
        ),
        bars("Throughput", rate.replace("_per_s", "/s"), labels, [(rate.removesuffix("_per_s"), _column(rows, rate))]),
        bars(
            "Memory",
            "MiB on one rank",
            labels,
            [(heading.partition(",")[0], _column(rows, key)) for key, heading in MEMORY_COLUMNS[1:-1]],
        ),
    ]
    _losses(made, result)
    timelines = [
        {"label": label, "ranks": row["timelines"]}
        for label, row in zip(labels, rows, strict=True)
        if row.get("timelines")
    ]
    if timelines:
        made.charts.append(timeline_chart(timelines))


def _losses(made: Section, result: dict[str, Any]) -> None:
    curves = [line(name, list(range(1, len(losses) + 1)), losses) for name, losses in result.get("losses", {}).items()]
    if curves:
        made.charts.append(lines("Loss", "step", "mean loss over the global batch", curves))


# ---- the others ----------------------------------------------------------------------------------------------------


def _bench_comm(made: Section, result: dict[str, Any]) -> None:
    rows: Rows = [{k: v for k, v in row.items() if k != "seconds_by_rank"} for row in result["rows"]]
    columns = [
        *(("collective", "collective"), ("backend", "backend"), ("algorithm", "algorithm"), ("size_bytes", "size, B")),
        *(("time_us", "time, us"), ("p50_us", "p50, us"), ("p99_us", "p99, us"), ("algbw_gbps", "algbw, GB/s")),
        *(("busbw_gbps", "busbw, GB/s"), ("wrong", "#wrong")),
    ]
    made.tables.append(Table("collectives", "Collectives, in nccl-tests' terms", columns, rows))
    keys = ("collective", "backend", "algorithm")
    groups: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(str(row[key]) for key in keys), []).append(row)
    several = len({key[0] for key in groups}) > 1
    for title, column, unit in (("Bus bandwidth", "busbw_gbps", "GB/s"), ("Time (p50)", "p50_us", "us")):
        curves = [
            line(_name(key, several), [row["size_bytes"] for row in mine], [row[column] for row in mine])
            for key, mine in groups.items()
        ]
        made.charts.append(lines(title, "size, B", unit, curves, log_x=True, log_y=True, points=True))


def _name(key: tuple[str, ...], several: bool) -> str:
    collective, backend, algorithm = key
    by = backend if algorithm == "native" else f"{backend} {algorithm}"
    return f"{collective}, {by}" if several else by


def _bench_scaling(made: Section, result: dict[str, Any]) -> None:
    rows: Rows = result["points"]
    columns = [
        *(("mode", "mode"), ("ranks", "ranks"), ("batch_size", "global batch"), ("step_ms", "step, ms")),
        *(("low95_ms", "95% from"), ("high95_ms", "95% to")),
        *(("samples_per_s", "samples/s"), ("speedup", "speed-up"), ("efficiency", "efficiency")),
        *(("ideal_ms", "ideal, ms"), ("communication_ms", "communication, ms"), ("imbalance_ms", "imbalance, ms")),
        *(("cores_ms", "shared cores or GPUs, ms"), ("other_ms", "other, ms")),
    ]
    made.sentences += result.get("sentences", [])
    made.tables.append(Table("scaling", "Scaling", columns, rows))
    sizes = sorted({row["ranks"] for row in rows})
    curves = [line("ideal", sizes, [float(n) for n in sizes], dashed=True)]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        mine = [row for row in rows if row["mode"] == mode]
        curves.append(line(mode, [row["ranks"] for row in mine], [row["speedup"] for row in mine]))
    if (serial := result.get("serial")) is not None:
        law = [1 / (serial + (1 - serial) / n) for n in sizes]
        curves.append(line(f"Amdahl, {serial:.1%} serial", sizes, law, dashed=True))
    made.charts.append(lines("Speed-up", "ranks", "over one rank", curves, points=True))
    parts = ("ideal", "communication", "imbalance", "cores", "other")
    names = {"imbalance": "load imbalance", "cores": "shared cores or GPUs"}
    made.charts.append(
        bars(
            "Where the time of a step goes",
            "ms",
            [f"{row['mode']}, {counted(row['ranks'], 'rank')}" for row in rows],
            [(names.get(p, p), [max(0.0, row[f"{p}_ms"]) for row in rows]) for p in parts],
        )
    )


def _train(made: Section, result: dict[str, Any]) -> None:
    metrics: Rows = result.get("metrics", [])
    steps = [row for row in metrics if row.get("kind") == "train"]
    tests = [row for row in metrics if row.get("kind") == "test"]
    if steps:
        curves = [line("train", [row["step"] for row in steps], [row["loss"] for row in steps])]
        if len(tests) > 1:
            curves.append(line("test", [row["step"] for row in tests], [row["loss"] for row in tests], dashed=True))
        made.charts.append(lines("Loss", "step", "mean loss", curves))
        rate = "tokens_per_s" if "tokens_per_s" in steps[0] else "samples_per_s"
        throughput = line("", [row["step"] for row in steps], [row[rate] for row in steps])
        made.charts.append(lines("Throughput", "step", rate.replace("_per_s", "/s"), [throughput]))
        parts = [
            key for key in ("data_ms", "forward_ms", "backward_ms", "optimizer_ms", "exposed_ms") if key in steps[0]
        ]
        means = [(p.removesuffix("_ms"), [sum(row[p] for row in steps) / len(steps)]) for p in parts]
        made.charts.append(bars("Where the time of a step goes", "ms, mean", [made.title], means))
    if tests:
        columns = [("epoch", "epoch"), ("step", "step"), ("loss", "test loss"), ("accuracy", "test accuracy")]
        made.tables.append(Table("test", "On the test set", _present(columns, tests), tests))


def _profile(made: Section, result: dict[str, Any]) -> None:
    made.sentences += result.get("words", [])
    diagnoses: Rows = result["diagnoses"]
    rows = [{"rank": rank, "step_ms": d["step_ms"], **d["shares"]} for rank, d in enumerate(diagnoses)]
    kinds = list(diagnoses[0]["shares"])
    columns = [("rank", "rank"), ("step_ms", "step, ms"), *((kind, f"{kind}, share") for kind in kinds)]
    made.tables.append(Table("bound", "What the step is bound by", columns, rows))
    made.charts.append(
        bars(
            "Where the time of a step goes",
            "ms",
            [f"rank {row['rank']}" for row in rows],
            [(kind, [row["step_ms"] * row[kind] for row in rows]) for kind in kinds],
        )
    )
    made.charts.append(timeline_chart([{"label": made.title, "ranks": result["timelines"]}]))


def _anything(made: Section, result: dict[str, Any]) -> None:
    made.sentences.append(f"a result of {made.kind!r}, which this version does not know how to draw")


FILLERS: dict[str, Callable[[Section, dict[str, Any]], None]] = {
    "bench train": _bench_train,
    "demo": _bench_train,
    "bench comm": _bench_comm,
    "bench scaling": _bench_scaling,
    "train": _train,
    "profile": _profile,
}


def loss_overlay(sections: list[Section]) -> Chart | None:
    """The losses of several training runs on one chart, where they must lie on each other if the runs are the same."""
    curves = []
    for made in sections:
        steps = [r for r in made.record.result.get("metrics", []) if r.get("kind") == "train"]
        if made.kind == "train" and steps:
            curves.append(line(made.title, [r["step"] for r in steps], [r["loss"] for r in steps]))
    return lines("Loss of all runs", "step", "mean loss", curves) if len(curves) > 1 else None


# ---- charts --------------------------------------------------------------------------------------------------------


def bars(
    title: str,
    unit: str,
    labels: list[str],
    series: list[tuple[str, list[Any]]],
    whiskers: list[list[Any]] | None = None,
) -> Chart:
    """Horizontal, one per label, stacked of the series."""
    stacked = [{"name": name, "values": values} for name, values in series]
    return {"type": "bars", "title": title, "unit": unit, "labels": labels, "series": stacked, "whiskers": whiskers}


def line(name: str, x: list[Any], y: list[Any], dashed: bool = False) -> dict[str, Any]:
    return {"name": name, "x": x, "y": y, "dashed": dashed}


def lines(
    title: str,
    x_label: str,
    y_label: str,
    curves: list[dict[str, Any]],
    log_x: bool = False,
    log_y: bool = False,
    points: bool = False,
) -> Chart:
    axes = {"xLabel": x_label, "yLabel": y_label, "logX": log_x, "logY": log_y, "points": points}
    return {"type": "lines", "title": title, "lines": curves, **axes}


def timeline_chart(choices: list[dict[str, Any]]) -> Chart:
    """One step of every rank; `choices`: of which strategy."""
    return {"type": "timeline", "title": "One step, rank by rank", "choices": choices}


def _column(rows: Rows, key: str) -> list[Any]:
    return [row.get(key) for row in rows]


def _present(columns: list[tuple[str, str]], rows: Rows) -> list[tuple[str, str]]:
    """Without columns that have nothing in them."""
    return [(key, heading) for key, heading in columns if any(row.get(key) not in (None, 0, "") for row in rows)]
