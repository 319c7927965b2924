"""`lockstep bench comm`."""

import csv
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import Progress

from lockstep.bench.comm import BY_HAND, COLLECTIVES, DTYPES, OPS, Pairs, Row, Sweep, bench_comm, bench_pairs
from lockstep.bench.comm_reading import FITTED, UTILISATION, curves, fit_rows, gradient_costs, human, sentences
from lockstep.bench.plot import plot_curves
from lockstep.cli.arguments import LinkFlag, check_folder, over_link, parse, refuse_positional
from lockstep.cli.tables import console, new_table
from lockstep.comm.by_hand import ranks_per_node
from lockstep.errors import UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.training.peak import peak_flops
from lockstep.world import World

UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


@dataclass
class BenchCommArguments:
    """Measure collectives over a range of sizes, in the terms of nccl-tests.

    algbw is size / time in 1e9 B/s; busbw is algbw times nccl-tests' factor (all_reduce 2(n-1)/n; all_gather,
    reduce_scatter, all_to_all, gather, scatter (n-1)/n; broadcast, reduce, send_recv 1). time is the mean over
    iterations and ranks; p50, p99 and max are of the slowest rank of each iteration. #wrong counts elements that are
    not what arithmetic says, exactly, in an untimed iteration. At the end: what the figures mean.

    For example:

    lockstep bench comm --nproc 2 --against gloo -b 4K -e 64M -f 4

    lockstep bench comm --nproc 4 --algorithms all --fit -b 1K -e 16M -f 8 --plot algorithms.png

    lockstep bench comm --link 1gbit -b 1M -e 64M -f 4 --algorithms native ring hierarchical

    lockstep bench comm --collectives all pairs --csv comm.csv --json comm.json
    """

    launch: Annotated[Launch, tyro.conf.arg(name="")] = field(default_factory=Launch)
    collectives: tuple[str, ...] = ("all_reduce",)
    """Names, or all: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send_recv;
    pairs: latency and bandwidth between each two ranks."""
    algorithms: tuple[str, ...] = ("native",)
    """native (the backend's own), all, or algorithms by hand. all_reduce: naive, tree, ring, recursive_doubling,
    halving_doubling, double_tree, hierarchical, auto; all_gather and reduce_scatter: ring; broadcast: tree."""
    against: tuple[str, ...] = ()
    """Other backends to measure in turns with the first one, in the same run."""
    min_bytes: Annotated[str, tyro.conf.arg(aliases=["-b"])] = "8"
    """Smallest size; K, M and G are powers of 1024."""
    max_bytes: Annotated[str, tyro.conf.arg(aliases=["-e"])] = "128M"
    """Largest size."""
    factor: Annotated[float, tyro.conf.arg(aliases=["-f"])] = 2.0
    """From one size to the next."""
    iters: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 20
    """Timed iterations per size."""
    warmup: Annotated[int, tyro.conf.arg(aliases=["-w"])] = 5
    """Untimed iterations before."""
    check: Annotated[Literal[0, 1], tyro.conf.arg(aliases=["-c"])] = 1
    """Count wrong elements, in an untimed iteration; 0: do not."""
    dtype: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "float"
    """float, double, half, bfloat16, int8, uint8, int32 or int64."""
    op: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "sum"
    """sum, avg, max, min or prod."""
    fit: bool = False
    """Fit the cost model to the all-reduces by hand; show it against what was measured."""
    delay_ms: float = 0.0
    """Hold back every message of the algorithms by hand by so much: what is put in must come out of the figures."""
    link: LinkFlag = None
    csv: str | None = None
    """Write one line per size to this file."""
    json: str | None = None
    """Write everything, each iteration of each rank too, to this file."""
    plot: str | None = None
    """Draw bandwidth and latency over size, log-log, to this file (.png, .svg or .pdf)."""


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


def main(argv: list[str]) -> int:
    refuse_positional(argv, "bench comm")
    arguments = parse(BenchCommArguments, argv, "bench comm")
    names, algorithms = _chosen(arguments)
    sweep = Sweep(
        _sizes(arguments.min_bytes, arguments.max_bytes, arguments.factor),
        _at_least("--iters", arguments.iters, 1),
        _at_least("--warmup", arguments.warmup, 0),
        bool(arguments.check),
        _one_of("--dtype", arguments.dtype, DTYPES),
        _one_of("--op", arguments.op, OPS),
        _at_least("--delay-ms", arguments.delay_ms, 0) / 1e3,
    )
    if sweep.op == "avg" and not DTYPES[sweep.dtype].is_floating_point:
        raise UserError(f"--op avg is for floating-point types, and --dtype is {sweep.dtype}; use --op sum")
    for flag, file in (("--csv", arguments.csv), ("--json", arguments.json), ("--plot", arguments.plot)):
        check_folder(flag, file)
    if arguments.link is not None:
        return over_link("bench comm", arguments.link, argv, arguments.launch)
    work = (names, list(arguments.against), algorithms, sweep)
    result: Result = run_on_ranks(_bench, *work, launch=arguments.launch, default_nproc=2)[0]
    if os.environ.get("RANK", "0") == "0":
        _show(result, arguments, sweep)
    return 1 if any(row.wrong for row in result.rows) else 0


def _chosen(arguments: BenchCommArguments) -> tuple[list[str], list[str]]:
    """The collectives and algorithms that were asked for, `all` spelt out."""
    names: list[str] = []
    for word in arguments.collectives:
        names += COLLECTIVES if word == "all" else [_one_of("--collectives", word, (*COLLECTIVES, "pairs"))]
    names = list(dict.fromkeys(names))
    known = ("native", "all", *dict.fromkeys(a for algorithms in BY_HAND.values() for a in algorithms))
    algorithms = [_one_of("--algorithms", word, known) for word in arguments.algorithms]
    for name in names:
        if name != "pairs" and not {"native", "all", *BY_HAND.get(name, ())} & set(algorithms):
            there_are = ", ".join(("native", *BY_HAND.get(name, ())))
            raise UserError(f"--algorithms {' '.join(algorithms)}: none of them is one of {name}'s ({there_are})")
    fittable = "all_reduce" in names and ("all" in algorithms or len(set(algorithms) & set(FITTED)) > 1)
    if arguments.fit and not fittable:
        raise UserError("--fit needs all_reduce by two or more algorithms by hand; add --algorithms all")
    return names, algorithms


def _one_of(flag: str, given: str, allowed: Any) -> str:
    if given not in allowed:
        raise UserError(f"{flag} {given}: it must be one of {', '.join(allowed)}")
    return given


def _at_least(flag: str, given: Any, least: int) -> Any:
    if given < least:
        raise UserError(f"{flag} is {given}, but it must be {least} or more")
    return given


def _bytes(flag: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise UserError(f"{flag} {text}: give a number of bytes, such as 8, 64K or 128M")
    return int(match[1]) * UNITS[match[2].upper()]


def _sizes(smallest: str, largest: str, factor: float) -> tuple[int, ...]:
    low, high = _bytes("--min-bytes", smallest), _bytes("--max-bytes", largest)
    if low > high:
        raise UserError(f"--min-bytes {smallest} is more than --max-bytes {largest}")
    if factor <= 1:
        raise UserError(f"--factor is {factor:g}, but it must be more than 1")
    sizes, size = [], float(low)
    while size <= high:
        sizes.append(int(size))
        size = max(size * factor, int(size) + 1)
    return tuple(sizes)


def _bench(world: World, names: list[str], against: list[str], algorithms: list[str], sweep: Sweep) -> Result:
    backends = list(dict.fromkeys([world.backend, *against]))
    measured = [name for name in names if name != "pairs"]
    total = len(measured) * len(sweep.sizes) + ("pairs" in names) * world.size * (world.size - 1) // 2
    with Progress(disable=not world.is_main) as bar:
        task = bar.add_task(f"{world.size} ranks", total=total)

        def progress(what: str) -> None:
            bar.update(task, description=f"{world.size} ranks: {what:<28}", advance=1)

        rows = bench_comm(world, measured, backends, algorithms, sweep, progress)
        pairs = bench_pairs(world, world.backend, sweep.iterations, progress) if "pairs" in names else None
    rate, source = peak_flops(world, "fp32")
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    return Result(rows, pairs, world.backend, name, rate, source, ranks_per_node(world.size))


# ---- what a person reads ------------------------------------------------------------------------------------


def _show(result: Result, arguments: BenchCommArguments, sweep: Sweep) -> None:
    screen = console()
    for collective in dict.fromkeys(row.collective for row in result.rows):
        _show_rows(screen, [r for r in result.rows if r.collective == collective], sweep, bool(arguments.against))
    if result.pairs is not None:
        _show_pairs(screen, result.pairs, result.backend)
    if arguments.fit:
        _show_fit(screen, result)
    if result.rows:
        _show_reading(screen, result)
    if arguments.csv is not None:
        write_csv(result.rows, Path(arguments.csv))
    if arguments.json is not None:
        write_json(result, Path(arguments.json))
    if arguments.plot is not None and result.rows:
        plot_curves(curves(result.rows), Path(arguments.plot))


def _show_rows(screen: Console, rows: list[Row], sweep: Sweep, compared: bool) -> None:
    several = len({r.candidate for r in rows}) > 1
    first = rows[0].candidate
    ratio = (f"p50 ratio\nto {rows[1].candidate.name}",) if compared else ()
    reference = rows[1].candidate if compared else first
    table = new_table(
        f"{rows[0].collective}, {rows[0].ranks} ranks, {sweep.iterations} iterations after {sweep.warmup}",
        ("by",) if several else (),
        ("size\nB", "count", "type", "redop", "time\nus", "algbw\nGB/s", "busbw\nGB/s", "#wrong"),
    )
    for heading in ("p50\nus", "p99\nus", "max\nus", "slow\nrank", *ratio):
        table.add_column(heading, justify="right", no_wrap=True)
    base = {r.nbytes: r.p50 for r in rows if r.candidate == reference}
    for row in rows:
        cells = [row.candidate.name] if several else []
        cells += [f"{row.nbytes}", f"{row.count}", row.dtype, row.op, _us(row.time)]
        cells += [f"{row.algbw:.3f}", f"{row.busbw:.3f}", "N/A" if row.wrong is None else str(row.wrong)]
        cells += [_us(row.p50), _us(row.p99), _us(row.max), str(row.slow_rank)]
        table.add_row(*cells, *((f"{row.p50 / base[row.nbytes]:.3f}",) if compared else ()))
    screen.print(table)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}" if seconds < 1e-3 else f"{1e6 * seconds:.0f}"


def _show_pairs(screen: Console, pairs: Pairs, backend: str) -> None:
    size = len(pairs.latency)
    screen.print("between each two ranks, one pair at a time: half a round trip of 8 B, and the rate of 4 MiB one way")
    for title, matrix, written in (
        (f"8 B, us ({backend})", pairs.latency, _us),
        (f"4 MiB, GB/s ({backend})", pairs.bandwidth, lambda rate: f"{rate / 1e9:.3f}"),
    ):
        table = new_table(title, ("rank",), tuple(str(r) for r in range(size)))
        for rank, line in enumerate(matrix):
            table.add_row(str(rank), *("-" if o == rank else written(v) for o, v in enumerate(line)))
        screen.print(table)


def _show_fit(screen: Console, result: Result) -> None:
    fitted = fit_rows(result.rows, result.ranks_per_node)
    assert fitted is not None, "checked when the flags were read"
    prices, predictions = fitted
    table = new_table(
        "the cost model, fitted to these measurements",
        ("algorithm",),
        ("size\nB", "measured\nus", "predicted\nus", "error\n%"),
    )
    for p in sorted(predictions, key=lambda p: (p.nbytes, p.measured)):
        table.add_row(p.algorithm, str(p.nbytes), _us(p.measured), _us(p.predicted), f"{100 * p.error:+.0f}")
    screen.print(table)
    errors = sorted(abs(p.error) for p in predictions)
    screen.print(
        f"On the busiest rank: {1e6 * prices.message:.1f} us per message, {1e12 * prices.byte_sent:.0f} us/MB sent, "
        f"{1e12 * prices.byte_added:.0f} us/MB added. On any rank: {1e6 * prices.any_message:.1f} us per message, "
        f"{1e12 * prices.any_byte:.0f} us/MB.\n"
        f"Error {errors[len(errors) // 2]:.0%} in the median, {errors[-1]:.0%} at most."
    )
    for nbytes in dict.fromkeys(p.nbytes for p in predictions):
        of_size = [p for p in predictions if p.nbytes == nbytes]
        chosen, best = min(of_size, key=lambda p: p.predicted), min(of_size, key=lambda p: p.measured)
        lost = chosen.measured / best.measured - 1
        verdict = "which is the fastest" if chosen is best else f"{best.algorithm} is {lost:.0%} faster"
        screen.print(f"  {human(nbytes):>8}: auto takes {chosen.algorithm}, {verdict}")


def _show_reading(screen: Console, result: Result) -> None:
    for curve in curves(result.rows):
        screen.print(" ".join(sentences(curve)))
    reduces = [c for c in curves(result.rows) if c.collective == "all_reduce"]
    if not reduces:
        return
    best = max(reduces, key=lambda c: c.peak.busbw)
    table = new_table(
        f"fp32 gradients over this link, all_reduce by {best.candidate.name}",
        ("model",),
        ("gradients\nMB", "items\n/rank/step", "communication\nms", "computation\nms", "share of\nstep %"),
    )
    for c in gradient_costs(best, result.peak_flops):
        table.add_row(
            c.model,
            f"{4e-6 * c.parameters:,.0f}",
            str(c.items),
            f"{1e3 * c.communication:,.1f}",
            f"{1e3 * c.computation:,.1f}",
            f"{100 * c.share:.0f}",
        )
    screen.print(table)
    screen.print(
        f"Communication: 2(n-1)/n S / busbw, nothing overlapped. Computation: 6 FLOP per parameter and item at "
        f"{UTILISATION:.0%} of {result.peak_flops / 1e12:.3g} TFLOP/s per rank ({result.peak_source})."
    )


# ---- files --------------------------------------------------------------------------------------------------

CSV_COLUMNS = (
    *("collective", "backend", "algorithm", "ranks", "size_bytes", "count", "type", "redop"),
    *("time_us", "algbw_gbps", "busbw_gbps", "wrong", "p50_us", "p99_us", "max_us", "slow_rank"),
)


def _figures(row: Row) -> dict[str, Any]:
    values = (
        *(row.collective, row.candidate.backend, row.candidate.algorithm, row.ranks),
        *(row.nbytes, row.count, row.dtype, row.op),
        *(round(1e6 * row.time, 3), float(f"{row.algbw:.6g}"), float(f"{row.busbw:.6g}"), row.wrong),
        *(*(round(1e6 * seconds, 3) for seconds in (row.p50, row.p99, row.max)), row.slow_rank),
    )
    return dict(zip(CSV_COLUMNS, values, strict=True))


def write_csv(rows: list[Row], file: Path) -> None:
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, CSV_COLUMNS)
        writer.writeheader()
        writer.writerows(_figures(row) for row in rows)


def write_json(result: Result, file: Path) -> None:
    """The rows as in the CSV, with the seconds of every iteration of every rank; and the pairs."""
    rows = [{**_figures(row), "seconds_by_rank": row.seconds} for row in result.rows]
    pairs = None
    if result.pairs is not None:
        pairs = {"latency_s": result.pairs.latency, "bandwidth_bytes_per_s": result.pairs.bandwidth}
    document = {"torch": torch.__version__, "device": result.device, "backend": result.backend}
    file.write_text(json.dumps({**document, "rows": rows, "pairs": pairs}, indent=1), encoding="utf-8")
