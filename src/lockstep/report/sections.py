"""From a record to what a page shows of it: sentences, tables and charts, as plain data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import UserError
from lockstep.results.chart import Chart, Curve, bars, lines, timeline
from lockstep.results.record import Record
from lockstep.words import counted

Rows = list[dict[str, Any]]


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
    """A part of the page: a heading, charts, tables, sentences."""

    kind: str
    title: str
    record: Record
    sentences: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    """The first `pictured` of them are what --plot draws."""
    pictured: int = 1


def section(record: Record) -> Section:
    made = Section(record.kind, record.title or record.kind, record)
    try:
        FILLERS.get(record.kind, _anything)(made, record.result)
    except SPOILED as error:
        raise spoiled(made, error) from None
    return made


SPOILED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
"""What a record gives that is not as we write them."""


def spoiled(made: Section, error: Exception) -> UserError:
    return UserError(f"the result {made.title!r} of {made.kind} is not whole ({error!r}); run it again")


# ---- bench train and demo ------------------------------------------------------------------------------------------

TIME_COLUMNS = [
    ("label", "strategy"),
    ("equal", "equal to one process"),
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
    for model, mine in _by_model(rows).items():
        of = f", {model}" if model else ""
        names = [labels[i] for i in mine]
        some = [rows[i] for i in mine]
        made.charts.append(
            bars(
                f"Step time{of}",
                "ms, median; whiskers p10 and p90",
                names,
                [("compute", _column(some, "compute_ms")), ("exposed communication", _column(some, "exposed_ms"))],
                whiskers=[(row.get("p10_ms"), row.get("p90_ms")) for row in some],
            )
        )
    made.pictured = len(made.charts)
    rate = "tokens_per_s" if any(row.get("tokens_per_s") for row in rows) else "samples_per_s"
    if made.pictured == 1:
        made.charts.append(bars("Throughput", rate.replace("_per_s", "/s"), labels, [(rate[:-6], _column(rows, rate))]))
    for model, mine in _by_model(rows).items():
        names, some = [labels[i] for i in mine], [rows[i] for i in mine]
        memory = [(heading.partition(",")[0], _column(some, key)) for key, heading in MEMORY_COLUMNS[1:-1]]
        made.charts.append(bars(f"Memory{f', {model}' if model else ''}", "MiB on one rank", names, memory))
    _losses(made, result)
    choices = [
        {"label": label, "ranks": row["timelines"]}
        for label, row in zip(labels, rows, strict=True)
        if row.get("timelines")
    ]
    if choices:
        made.charts.append(timeline("The median step, rank by rank", choices))


def _by_model(rows: Rows) -> dict[str, list[int]]:
    """Rows of each model; one nameless group where all are of one."""
    sizes = [row.get("parameters") for row in rows]
    if len(set(sizes)) < 2:
        return {"": list(range(len(rows)))}
    found: dict[str, list[int]] = {}
    for number, size in enumerate(sizes):
        found.setdefault("" if size is None else f"{size:,} parameters", []).append(number)
    return found


EQUAL_LOSSES = 1e-7
"""Relative: losses that differ by less, in every step, are drawn as one line."""


def _losses(made: Section, result: dict[str, Any]) -> None:
    groups: list[tuple[list[str], list[float | None]]] = []
    for name, losses in result.get("losses", {}).items():
        like = next((names for names, others in groups if _same(losses, others)), None)
        if like is None:
            groups.append(([name], losses))
        else:
            like.append(name)
    if groups:
        curves = [Curve(_together(names), range(1, len(losses) + 1), losses) for names, losses in groups]
        made.charts.append(lines("Loss", "step", "mean loss over the global batch", curves))


def _same(losses: list[float | None], others: list[float | None]) -> bool:
    """None: it was not finite."""
    if len(losses) != len(others):
        return False
    pairs = zip(losses, others, strict=True)
    return all(a is b if a is None or b is None else abs(a - b) <= EQUAL_LOSSES * max(abs(a), abs(b)) for a, b in pairs)


def _together(names: list[str]) -> str:
    if len(names) < 4:
        return " = ".join(names)
    return f"{names[0]} = {names[1]} = ... = {names[-1]}, {len(names)} equal"


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
    for title, column, unit, upper in (
        ("Bus bandwidth", "busbw_gbps", "GB/s", None),
        ("Time", "p50_us", "us (p50; shaded up to p99)", "p99_us"),
    ):
        found = [
            Curve(
                _name(key, several),
                _column(mine, "size_bytes"),
                _column(mine, column),
                _column(mine, upper) if upper else None,
            )
            for key, mine in groups.items()
        ]
        made.charts.append(lines(title, "size", unit, found, log=True, points=True, sizes=True))
    made.pictured = 2


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
    speedups = [Curve("ideal", sizes, [float(n) for n in sizes], dashed=True)]
    efficiencies = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        mine = [row for row in rows if row["mode"] == mode]
        ranks = _column(mine, "ranks")
        speedups.append(Curve(mode, ranks, _column(mine, "speedup")))
        efficiencies.append(Curve(mode, ranks, [None if (e := row["efficiency"]) is None else 100 * e for row in mine]))
    if (serial := result.get("serial")) is not None:
        law = [1 / (serial + (1 - serial) / n) for n in sizes]
        speedups.append(Curve(f"Amdahl, {serial:.1%} serial", sizes, law, dashed=True))
    slots = result.get("slots", sizes[-1])
    shared = f" (beyond {slots} ranks share cores)" if slots < sizes[-1] else ""
    made.charts += [
        lines(f"Speed-up{shared}", "ranks", "over one rank", speedups, points=True),
        lines(f"Efficiency{shared}", "ranks", "%", efficiencies, points=True),
    ]
    made.pictured = 2
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
        curves = [Curve("train", _column(steps, "step"), _column(steps, "loss"))]
        if len(tests) > 1:
            curves.append(Curve("test", _column(tests, "step"), _column(tests, "loss")))
        made.charts.append(lines("Loss", "step", "mean loss", curves))
        rate = "tokens_per_s" if "tokens_per_s" in steps[0] else "samples_per_s"
        throughput = Curve("", _column(steps, "step"), _column(steps, rate))
        made.charts.append(lines("Throughput", "step", rate.replace("_per_s", "/s"), [throughput]))
        parts = [
            key for key in ("data_ms", "forward_ms", "backward_ms", "optimizer_ms", "exposed_ms") if key in steps[0]
        ]
        means = [(p.removesuffix("_ms"), [sum(row[p] or 0.0 for row in steps) / len(steps)]) for p in parts]
        made.charts.append(bars("Where the time of a step goes", "ms, mean", [made.title], means))
    loads = [row for row in metrics if row.get("kind") == "experts"]
    if loads:
        _experts(made, steps, loads)
    if tests:
        columns = [("epoch", "epoch"), ("step", "step"), ("loss", "test loss"), ("accuracy", "test accuracy")]
        made.tables.append(Table("test", "On the test set", _present(columns, tests), tests))


def _experts(made: Section, steps: Rows, loads: Rows) -> None:
    """How evenly experts were used: over the run, and by each mixture at its end."""
    curve = Curve("", _column(steps, "step"), _column(steps, "busiest_expert"))
    made.charts.append(lines("Load of the busiest expert", "step", "times an equal share", [curve]))
    rows = []
    for name, load in loads[-1]["load"].items():
        equal = max(1, sum(load)) / len(load)
        unused = load.count(0)
        rows.append({"mixture": name, "busiest": max(load) / equal, "idlest": min(load) / equal, "unused": unused})
    columns = [("mixture", "mixture"), ("busiest", "busiest, times an equal share"), ("idlest", "least used, times")]
    caption = f"Load of experts, up to step {loads[-1]['step']}"
    made.tables.append(Table("experts", caption, [*columns, ("unused", "without a token")], rows))
    share = sum(row.get("dropped_share") or 0.0 for row in steps) / max(1, len(steps))
    if share:
        made.sentences.append(f"capacity dropped {share:.2%} of the choices")


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
    made.charts.append(timeline("One step, rank by rank", [{"label": made.title, "ranks": result["timelines"]}]))


def _anything(made: Section, result: dict[str, Any]) -> None:
    made.sentences.append(f"a result of {made.kind!r}, which this version does not know how to draw")


def _to_a_loss(made: Section, result: dict[str, Any]) -> None:
    rows: Rows = [{**row, **{key: _mean_of(row[key]) for key in MEANS}} for row in result["rows"]]
    columns = [
        ("label", "strategy"),
        ("step_ms", "step, ms"),
        ("megabytes", "MB sent/step"),
        ("loss", "test loss at the end"),
        ("seconds", "seconds to the loss"),
        ("over_first", "over the first"),
        ("megabytes_to_loss", "MB sent to the loss"),
    ]
    made.tables.append(Table("to_a_loss", "Until the first strategy's last test loss", columns, rows))
    first = [t for t in result["trainings"] if t["seed"] == result["trainings"][0]["seed"]]
    for key, label in (("seconds", "seconds of training"), ("megabytes", "MB that a rank has sent")):
        curves = [Curve(t["label"], [p[key] for p in t["points"]], [p["loss"] for p in t["points"]]) for t in first]
        made.charts.append(lines(f"Test loss over {label}", label, "test loss", curves))
    made.pictured = 2


MEANS = ("seconds", "over_first", "megabytes_to_loss")


def _mean_of(values: list[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


FILLERS: dict[str, Callable[[Section, dict[str, Any]], None]] = {
    "bench train": _bench_train,
    "demo": _bench_train,
    "bench to a loss": _to_a_loss,
    "bench comm": _bench_comm,
    "bench scaling": _bench_scaling,
    "train": _train,
    "profile": _profile,
}


def loss_overlay(sections: list[Section]) -> Chart | None:
    """The losses of several training runs on one chart, where they must lie on each other if the runs are the same."""
    curves = []
    for made in sections:
        if made.kind != "train":
            continue
        steps = [r for r in made.record.result.get("metrics", []) if r.get("kind") == "train"]
        if steps:
            curves.append(Curve(made.title, _column(steps, "step"), _column(steps, "loss")))
    return lines("Loss of all runs", "step", "mean loss", curves) if len(curves) > 1 else None


def _column(rows: Rows, key: str) -> list[Any]:
    return [row.get(key) for row in rows]


def _present(columns: list[tuple[str, str]], rows: Rows) -> list[tuple[str, str]]:
    """Without columns that have nothing in them."""
    return [(key, heading) for key, heading in columns if any(row.get(key) not in (None, 0, "") for row in rows)]
