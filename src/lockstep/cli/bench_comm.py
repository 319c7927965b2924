"""`lockstep bench comm`."""

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from lockstep.bar import Bar
from lockstep.bench.comm import Row, bench_comm
from lockstep.bench.pairs import bench_pairs
from lockstep.bench.trial import BY_HAND, COLLECTIVES, DTYPES, OPS, Sweep
from lockstep.cli.arguments import LinkFlag
from lockstep.cli.checks import over_link
from lockstep.cli.comm_tables import Result, as_record, figures, show_fit, show_pairs, show_reading, show_rows
from lockstep.cli.flags import config_from
from lockstep.cli.parsing import check_outputs, parse
from lockstep.cli.tables import console, keep, write_rows
from lockstep.comm.algorithms import ALGORITHMS
from lockstep.comm.wire import Wire
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.measure.peak import peak_flops
from lockstep.words import counted

UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


@dataclass
class BenchCommArguments:
    """Measure collectives over a range of sizes, in the terms of nccl-tests.

    algbw is size / time in 1e9 B/s; busbw is algbw times nccl-tests' factor (all_reduce 2(n-1)/n; all_gather,
    reduce_scatter, all_to_all, gather, scatter (n-1)/n; broadcast, reduce, send_recv 1). time is the mean over
    iterations and ranks; p50, p99 and max are of the slowest rank of each iteration. #wrong counts elements that are
    not what arithmetic says, exactly, in an untimed iteration. At the end: what the figures mean, and what the
    gradients of known models cost on this link; and of yours, where a config comes first.

    For example:

    lockstep bench comm --nproc 2 --against gloo -b 4K -e 64M -f 4

    lockstep bench comm --nproc 4 --algorithms all --fit -b 1K -e 16M -f 8 --plot algorithms.png

    lockstep bench comm configs/gpt_text.yaml --nproc 2 -b 1M -e 64M -f 8

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
    """Write one line per size and candidate to this file, as they are measured."""
    json: str | None = None
    """Write everything, each iteration of each rank too, to this file."""
    plot: str | None = None
    """Draw bandwidth and latency over size, log-log, to this file (.png, .svg or .pdf)."""


@dataclass(frozen=True)
class Files:
    """Where results go: after each size, so that what was measured survives whatever ends the run."""

    csv: str | None
    json: str | None

    def write(self, result: Result) -> None:
        if self.csv is not None:
            write_rows([figures(row) for row in result.rows], Path(self.csv))
        keep(as_record(result), self.json, None)


def main(argv: list[str]) -> int:
    file = argv[0] if argv and not argv[0].startswith("-") else None
    config = config_from([file])[0] if file is not None else None
    arguments = parse(BenchCommArguments, argv if file is None else argv[1:], "bench comm")
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
    check_outputs(arguments.csv, arguments.json, arguments.plot)
    if arguments.link is not None:
        return over_link("bench comm", arguments.link, argv, arguments.launch)
    work = (names, list(arguments.against), algorithms, sweep, Files(arguments.csv, arguments.json))
    result: Result = run_on_ranks(_bench, *work, launch=arguments.launch, default_nproc=2)[0]
    if os.environ.get("RANK", "0") == "0":
        _show(result, arguments, sweep, config, "" if file is None else Path(file).stem)
    return 1 if any(row.wrong for row in result.rows) else 0


def _chosen(arguments: BenchCommArguments) -> tuple[list[str], list[str]]:
    """The collectives and algorithms that were asked for, `all` spelt out."""
    names: list[str] = []
    for word in arguments.collectives:
        names += COLLECTIVES if word == "all" else [_one_of("--collectives", word, (*COLLECTIVES, "pairs"))]
    names = list(dict.fromkeys(names))
    if not names:
        raise UserError(f"--collectives needs at least one of {', '.join(COLLECTIVES)}, pairs")
    known = ("native", "all", *dict.fromkeys(a for algorithms in BY_HAND.values() for a in algorithms))
    algorithms = [_one_of("--algorithms", word, known) for word in arguments.algorithms]
    for name in names:
        if name != "pairs" and not {"native", "all", *BY_HAND.get(name, ())} & set(algorithms):
            there_are = ", ".join(("native", *BY_HAND.get(name, ())))
            raise UserError(f"--algorithms {' '.join(algorithms)}: none of them is one of {name}'s ({there_are})")
    if arguments.against and not {"native", "all"} & set(algorithms):
        raise UserError("--against compares backends' own algorithms: add native to --algorithms")
    fittable = "all_reduce" in names and ("all" in algorithms or len(set(algorithms) & set(ALGORITHMS)) > 1)
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


def _bench(
    world: World, names: list[str], against: list[str], algorithms: list[str], sweep: Sweep, files: Files
) -> Result:
    if world.backend in against:
        raise UserError(f"--against {world.backend}: that is the backend of the run already; name another")
    backends = list(dict.fromkeys([world.backend, *against]))
    measured = [name for name in names if name != "pairs"]
    total = len(measured) * len(sweep.sizes) + ("pairs" in names) * world.size * (world.size - 1) // 2
    rate, source = peak_flops(world, "fp32")
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    per_node = Wire().ranks_per_node if world.size > 1 else 1
    result = Result([], None, world.backend, name, rate, source, per_node)
    with Bar(disable=not world.is_main) as bar:
        task = bar.add_task(counted(world.size, "rank"), total=total)

        def progress(what: str) -> None:
            bar.update(task, description=f"{counted(world.size, 'rank')}: {what:<28}", advance=1)

        def so_far(rows: list[Row]) -> None:
            if world.is_main:
                files.write(replace(result, rows=rows))

        result.rows = bench_comm(world, measured, backends, algorithms, sweep, progress, so_far)
        if "pairs" in names:
            result.pairs = bench_pairs(world, world.backend, sweep.iterations, progress)
    return result


def _show(result: Result, arguments: BenchCommArguments, sweep: Sweep, config: Config | None, name: str) -> None:
    screen = console()
    for collective in dict.fromkeys(row.collective for row in result.rows):
        show_rows(screen, [r for r in result.rows if r.collective == collective], sweep, bool(arguments.against))
    if result.pairs is not None:
        show_pairs(screen, result.pairs, result.backend)
    if arguments.fit:
        show_fit(screen, result)
    if result.rows:
        show_reading(screen, result, config, name)
    Files(arguments.csv, arguments.json).write(result)
    keep(as_record(result), None, arguments.plot if result.rows else None)
