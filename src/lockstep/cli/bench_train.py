"""`lockstep bench train`."""

import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.bar import Bar
from lockstep.bench.network import predicted_shares
from lockstep.bench.presets import Preset, preset_named, time_on_cpu, with_known_names, with_size_that_fits
from lockstep.bench.train import Case, Peaks, bench_cases, one_process
from lockstep.cli.arguments import LinkFlag, RunArguments
from lockstep.cli.bench_to_loss import bench_to_loss
from lockstep.cli.checks import check_before_ranks, check_link, over_link
from lockstep.cli.flags import config_from, flag_value, sections, without_flag
from lockstep.cli.parsing import check_outputs, parse
from lockstep.cli.tables import console, keep, write_rows
from lockstep.cli.train_tables import print_network_shares, print_timings, ranks_of, verdicts
from lockstep.config import GPT, Config
from lockstep.config.user_code import shown_name
from lockstep.errors import RankError, UserError
from lockstep.launch import adopt_environment, run_on_ranks
from lockstep.launch.join import check_known
from lockstep.launch.link import DEFAULT_RANKS, OVER_LINK
from lockstep.launch.start import falls_back_to_cpu
from lockstep.layout.world import World
from lockstep.measure.expected import named_config
from lockstep.measure.peak import slow_precision
from lockstep.measure.steps import MEMORY_STEPS
from lockstep.measure.timing import Timing, as_rows, baselines_among
from lockstep.results.record import Record, read_record
from lockstep.strategies import strategy_names
from lockstep.words import counted


@dataclass
class BenchTrainArguments(RunArguments):
    """Time training steps of several strategies, in turns in one run, so that noise hits all alike.

    A config file may come first. The ratio column is the median over the rounds of a strategy's step time over the
    first strategy's in the same round.

    For example:

    lockstep bench train --strategies ddp bucketed flat overlap naive

    lockstep bench train configs/bench_gpt25m.yaml --strategies ddp bucketed --steps 40 --csv gpt.csv

    lockstep bench train configs/bench_mlp16.yaml --strategies ddp@gloo ddp@shm bucketed@shm

    lockstep bench train --preset buckets --plot buckets.png

    lockstep bench train --preset low-communication --link 100mbit --nproc 2 --plot losses.png
    """

    preset: str | None = None
    """A question by name, instead of --strategies: cnn-sizes, ddp-vs-fsdp, naive-ddp, buckets, hooks-vs-manual,
    overlap, accumulation, compression, low-communication, zero-stages or experts."""
    strategies: tuple[str, ...] = ("ddp", "bucketed", "flat", "overlap", "naive")
    """Names, or all; the first is the one that ratios refer to. An @ names the backend: ddp@gloo bucketed@shm."""
    steps: int | None = None
    """Timed steps of each strategy. None: 30, or what the preset says."""
    warmup: int = 3
    """Untimed steps before."""
    baseline: bool = True
    """Also time one process with the whole batch, for the speed-up column."""
    seeds: int = 3
    """Of --preset low-communication, whose strategies train to a loss: so many times each."""
    link: LinkFlag = None
    csv: str | None = None
    """Write one line per strategy, and for one process, to this file."""
    json: str | None = None
    """Write everything to this file, for `lockstep report`."""
    plot: str | None = None
    """Draw step times, split into work and exposed communication, to this file (.png, .svg or .pdf)."""


def main(argv: list[str]) -> int:
    name = flag_value(argv, "--preset")
    preset = preset_named(name) if name is not None else None
    config, rest = config_from(argv, preset.config if preset is not None else None)
    if preset is not None:
        check_preset(preset, config, argv)
    if flag_value(argv, "--seeds") is not None and (preset is None or not preset.trains):
        raise UserError("--seeds is about --preset low-communication, whose strategies train to a loss; leave it out")
    arguments = parse(BenchTrainArguments, rest, "bench train", default=BenchTrainArguments(**sections(config)))
    config = arguments.config()
    if flag_value(rest, "--parallel.data") is not None:
        raise UserError("--parallel.data names one strategy; bench train compares those of --strategies or --preset")
    steps = arguments.steps if arguments.steps is not None else preset.steps if preset is not None else 30
    if steps < 1 or arguments.warmup < 0:
        raise UserError(f"--steps {steps} --warmup {arguments.warmup}: at least 1 step and 0 warm-up steps")
    if preset is not None and preset.trains:
        check_outputs(arguments.csv, arguments.json, arguments.plot)
        if arguments.link is not None:
            return over_link("bench train", arguments.link, argv, arguments.launch)
        files = arguments.csv, arguments.json, arguments.plot
        return bench_to_loss(preset, config, arguments.seeds, arguments.launch, files)
    if preset is not None and preset.csv is not None and arguments.csv is None:
        arguments.csv = in_new_folder(preset.csv)
    check_outputs(arguments.csv, arguments.json, arguments.plot)
    if preset is None:
        names = known_names(arguments.strategies)
        if not names:
            raise UserError("--strategies has no name behind it; give some, or leave it out")
        cases = [
            Case(name, name, config, ranks=1, all_cores=True) if name == "single" else Case(name, name, config)
            for name in names
        ]
    else:
        config = settled(arguments, preset, config, argv)
        cases = preset.cases(config)
    if arguments.link is not None:
        check_link(arguments.link, arguments.launch)
    baselines = one_process(cases) if arguments.baseline else []
    default_nproc = 2 if arguments.link is None else DEFAULT_RANKS
    for case in cases:
        check_before_ranks(named_config(case.config, case.strategy), arguments.launch, default_nproc)
    one_by_one = preset is not None and preset.one_by_one
    timings: list[Timing] = run_on_ranks(
        *(time_cases, [*cases, *baselines], steps, arguments.warmup, one_by_one),
        launch=arguments.launch,
        default_nproc=default_nproc,
    )[0]
    if os.environ.get("RANK", "0") == "0":
        show(arguments, config, timings[: len(cases)], timings[len(cases) :], argv)
    return 0


def in_new_folder(file: str) -> str:
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{Path(file).parent} cannot be made ({error.strerror}); give --csv FILE") from None
    return file


def check_preset(preset: Preset, config: Config, argv: list[str]) -> None:
    """Refuse flags that would change nothing."""
    flags = [word.partition("=")[0] for word in argv]
    for flag in ("--steps", "--warmup", "--baseline", "--no-baseline"):
        if preset.trains and flag in flags:
            raise UserError(f"{flag} is about timed steps, and this preset trains; --train.steps says how long")
    if "--strategies" in flags:
        raise UserError("--preset has strategies of its own; leave --strategies out, or --preset")
    model = next((flag for flag in flags if flag.startswith("--model")), None)
    if preset.sets_model and model is not None:
        raise UserError(f"{model}: this preset compares models of its own; leave it out")
    if config.model.name != preset.config.model.name:
        raise UserError(f"this preset is about the model {preset.config.model.name}, not {config.model.name}")


def settled(arguments: BenchTrainArguments, preset: Preset, config: Config, argv: list[str]) -> Config:
    """With what depends on this machine: which GPT fits, if none was asked for."""
    asked = any(word.startswith(("--model.size", "--model.d", "--model.layers", "--model.width")) for word in argv)
    if not preset.is_large or asked or config.model != preset.config.model:
        return config
    default = 2 if arguments.link is None else DEFAULT_RANKS
    given = int(os.environ.get("WORLD_SIZE", "0")) or arguments.launch.nproc or default
    launch = arguments.launch
    if falls_back_to_cpu(launch, given):
        launch = replace(launch, device="cpu")
    lines = []
    if isinstance(config.model, GPT):
        config, why = with_size_that_fits(config, launch, given)
        lines.append(why)
    on_cpu = launch.device == "cpu" or not torch.cuda.is_available()
    if on_cpu and not adopt_environment():  # else this process has a rank's cores only
        timed = arguments.steps if arguments.steps is not None else preset.steps
        steps = (timed + arguments.warmup + MEMORY_STEPS) * (len(preset.cases(config)) + arguments.baseline)
        lines.append(time_on_cpu(config, steps))
    for line in lines if os.environ.get("RANK", "0") == "0" else ():
        console().print(line, soft_wrap=True)
    return config


def show(
    arguments: BenchTrainArguments, config: Config, timings: list[Timing], baselines: list[Timing], argv: list[str]
) -> None:
    reading = preset_named(arguments.preset).reading(timings) if arguments.preset is not None else []
    slow = slow_precision(timings[0].device, config.train.precision, config.train.compile != "none")
    lines = [*reading, *slow, *verdicts(timings)]
    print_timings(console(), timings, baselines, lines)
    everyone = [*timings, *baselines]
    rows = as_rows(everyone, baselines_among(everyone))
    networks = max(t.ranks for t in timings) > 1 and OVER_LINK not in os.environ
    if networks:
        rows = [{**row, **predicted_shares(t)} if t.ranks > 1 else row for row, t in zip(rows, everyone, strict=True)]
    write(arguments, config, everyone, rows, lines)
    if arguments.csv is not None:
        console().print(f"figures in {arguments.csv}", soft_wrap=True)
    measured = rows_over_link(arguments, argv) if arguments.link is not None else []
    if networks:
        print_network_shares(console(), timings, arguments.link, measured)
    if measured:
        rows = [{**row, "link": "none"} for row in rows] + [{**row, "link": arguments.link} for row in measured]
        write(arguments, config, everyone, rows, lines)


def write(
    arguments: BenchTrainArguments,
    config: Config,
    timings: list[Timing],
    rows: list[dict[str, Any]],
    lines: list[str],
) -> None:
    if arguments.csv is not None:
        columns = preset_named(arguments.preset).columns if arguments.preset is not None else {}
        write_rows(with_known_names(rows, columns), Path(arguments.csv))
    if arguments.plot is None and arguments.json is None:
        return
    model = f"{shown_name(config.model)} of {timings[0].parameters:,} parameters"
    batch = f"{config.train.precision}, batch {config.train.batch_size}"
    title = f"{arguments.preset or f'{model}, {batch}'}, {ranks_of(timings)}"
    drawn = {t.label: t.timelines for t in timings}
    rows = [{**row, "timelines": drawn[row["label"]] if row.get("link") in (None, "none") else []} for row in rows]
    record = Record("bench train", {"rows": rows, "sentences": lines}, asdict(config), title=title)
    keep(record, arguments.json, arguments.plot)


def rows_over_link(arguments: BenchTrainArguments, argv: list[str]) -> list[dict[str, Any]]:
    """The same cases on ranks of two nodes that a slow network joins."""
    assert arguments.link is not None
    console().print(f"\nthe same on two nodes joined by {arguments.link}:\n")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "link.json"
        rest = [*without_flag(argv, "--csv", "--json", "--plot"), "--json", str(file), "--no-baseline"]
        status = over_link("bench train", arguments.link, rest, arguments.launch)
        if status != 0:
            raise RankError(f"the ranks over --link {arguments.link} have failed (exit status {status})")
        rows: list[dict[str, Any]] = read_record(file).result["rows"]
        return [{name: value for name, value in row.items() if name != "timelines"} for row in rows]


def known_names(wanted: tuple[str, ...]) -> list[str]:
    """`all` spelt out, each strategy known; the backend after an @ stays."""
    names = []
    for word in wanted:
        strategy, at, backend = word.partition("@")
        if at:
            check_known(backend, f"--strategies {word}: the backend")
        names += [f"{name}{at}{backend}" for name in strategy_names([strategy])]
    return list(dict.fromkeys(names))


def time_cases(world: World, cases: list[Case], steps: int, warmup: int, one_by_one: bool = False) -> list[Timing]:
    """In turns, or each case alone with the machine's memory."""
    groups = [[case] for case in cases] if one_by_one else [cases]
    how = "one by one" if one_by_one else "in turns"
    with Bar(disable=not world.is_main) as progress:
        total = len(groups) * (steps + warmup)
        task = progress.add_task(f"{counted(world.size, 'rank')}, {counted(len(cases), 'case')} {how}", total=total)
        found, peaks = [], Peaks()
        for group in groups:
            found += bench_cases(world, group, steps, warmup, lambda: progress.advance(task), peaks)
        return [replace(timing, in_turns=not one_by_one) for timing in found]
