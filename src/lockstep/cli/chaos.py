"""`lockstep chaos`."""

import random
import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from lockstep.bar import Bar
from lockstep.chaos.faults import ALL, BY_NAME, FIRST_RANK, Fault
from lockstep.chaos.nodes import check_partition
from lockstep.chaos.round import Round, Setting, play, undisturbed
from lockstep.cli.flags import config_from
from lockstep.cli.parsing import check_output, parse
from lockstep.cli.tables import console, new_table
from lockstep.config import save_config
from lockstep.errors import UserError
from lockstep.launch import adopt_environment
from lockstep.results.record import Record

NAMED, RESUMED = 2.0, 15.0
"""Seconds within which a fault is to be named, and the run to go on."""


@dataclass
class ChaosArguments:
    """Inject faults into real runs of a config, lockstep chaos CONFIG, and report the outcome of each: how soon it was
    named, how soon the run went on, how many steps were lost, whether the weights at the end are bit for bit those of
    an undisturbed run, and what was left behind. The exit status is 1 where something is not as it should be.

    For example:

    lockstep chaos configs/digits_cnn.yaml --rounds 20

    lockstep chaos configs/digits_cnn.yaml --faults kill-rank stop-rank --rounds 6 --backend gloo
    """

    faults: tuple[str, ...] = ("all",)
    """all, or some of kill-rank, kill-launcher, kill-agent, partition (on two nodes; needs root and
    iproute2), stop-rank, raise, exit, wrong-collective, slow-rank, nan, full-disk, save-1 to save-5 (kill -9 at each
    moment of saving), truncated, flipped, missing, swapped, taken-port."""
    rounds: int = 20
    """Runs in all: the faults take turns."""
    nproc: int = 2
    """Ranks of each run."""
    backend: str = "auto"
    timeout: float = 5.0
    """Of the runs: seconds after which a rank that does not answer is an error."""
    steps: int = 120
    """Of each run; the fault comes somewhere between the first and the second quarter of them."""
    save_every: int = 10
    """Steps between checkpoints."""
    seed: int = 0
    """Of the steps and ranks that are hit."""
    keep: str | None = None
    """Keep the runs' folders here. None: they are removed."""
    json: str | None = None
    """Write the rounds to this file."""


def main(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        if {"-h", "--help"} & set(argv):
            parse(ChaosArguments, argv, "chaos CONFIG")
        raise UserError("lockstep chaos needs a config file first: lockstep chaos configs/digits_cnn.yaml --rounds 20")
    arguments = parse(ChaosArguments, argv[1:], "chaos CONFIG")
    faults = chosen(arguments)
    config, _ = config_from(argv[:1])
    config.train.steps, config.train.log_every, config.train.evaluate_every = arguments.steps, 5, 0
    config.checkpoint.every, config.checkpoint.keep_last = arguments.save_every, 3
    if arguments.json is not None:
        check_output("--json", arguments.json)
    place = nullcontext(arguments.keep) if arguments.keep else tempfile.TemporaryDirectory(prefix="chaos-")
    with place as folder:
        home = Path(folder).resolve()
        home.mkdir(parents=True, exist_ok=True)
        file = home / "config.yaml"
        save_config(config, file)
        setting = Setting(file, home, arguments.nproc, arguments.backend, arguments.timeout)
        rounds = played(setting, faults, arguments)
    if arguments.json is not None:
        Record("chaos", {"rounds": [asdict(r) for r in rounds]}, title="chaos").write(Path(arguments.json))
    return shown(rounds, arguments.timeout)


def chosen(arguments: ChaosArguments) -> list[Fault]:
    if adopt_environment():
        raise UserError("lockstep chaos starts its own runs; leave torchrun and srun out")
    unknown = sorted(set(arguments.faults) - {*BY_NAME, "all"})
    if unknown:
        raise UserError(f"--faults {unknown[0]} is unknown; there are all, {', '.join(BY_NAME)}")
    numbers = {"--rounds": (arguments.rounds, 1), "--nproc": (arguments.nproc, 2), "--steps": (arguments.steps, 80)}
    for flag, (value, least) in {**numbers, "--save-every": (arguments.save_every, 1)}.items():
        if value < least:
            raise UserError(f"{flag} is {value}, but it must be {least} or more")
    if "all" not in arguments.faults:
        if "partition" in arguments.faults:
            check_partition()
        return [BY_NAME[name] for name in arguments.faults]
    try:
        check_partition()
    except UserError as impossible:
        print(f"without partition: {impossible}")
        return [fault for fault in ALL if fault.name != "partition"]
    return list(ALL)


def played(setting: Setting, faults: list[Fault], arguments: ChaosArguments) -> list[Round]:
    dice, rounds = random.Random(arguments.seed), []
    with Bar(transient=True) as bar:
        task = bar.add_task("undisturbed", total=arguments.rounds + 1)
        expected = undisturbed(setting)
        for number in range(arguments.rounds):
            fault = faults[number % len(faults)]
            bar.update(task, advance=1, description=fault.name)
            step = dice.randint(arguments.steps // 4, arguments.steps // 2)
            rank = 0 if fault.name in FIRST_RANK else dice.randrange(setting.nproc)
            rounds.append(play(setting, fault, number, step, rank, expected))
        bar.update(task, advance=1)
    return rounds


# ---- what is shown -----------------------------------------------------------------------------------------------


def shown(rounds: list[Round], timeout: float) -> int:
    """The table, and below it what went wrong. 0 if nothing did."""
    screen = console()
    screen.print(table(rounds, timeout))
    mistakes = [line for one in rounds for line in mistakes_of(one)]
    for line in mistakes:
        screen.print(f"[red]✗[/] {line}", highlight=False, soft_wrap=True)
    late = [line for one in rounds for line in lateness_of(one, timeout)]
    for line in late:  # no mistake: the machine may have been busy
        screen.print(f"later than meant: {line}", highlight=False, soft_wrap=True)
    if not mistakes:
        named = "every fault was named" + (" in time" if not late else "")
        screen.print(f"{len(rounds)} rounds: {named}, no weight was lost, nothing was left")
    return 1 if mistakes else 0


def lateness_of(one: Round, timeout: float) -> list[str]:
    """A taken port is given time to become free, and a straggler is named after some steps: neither has a bound."""
    fault = BY_NAME[one.fault]
    found, bound = [], NAMED + (timeout if fault.hangs else 0.0)
    bounded = fault.after in ("restarted", "resumed")
    if bounded and one.named is not None and round(one.named, 1) > bound:
        found.append(f"{one.fault} was named after {one.named:.1f} s, not {bound:g}")
    if bounded and one.resumed is not None and round(one.resumed, 1) > RESUMED:
        found.append(f"{one.fault} went on after {one.resumed:.1f} s, not {RESUMED:g}")
    return found


def mistakes_of(one: Round) -> list[str]:
    fault, found = BY_NAME[one.fault], []
    if one.problem:
        found.append(f"{one.fault}: {one.problem}\n{one.output[-2000:]}")
    if fault.named and one.named is None and not one.problem:
        found.append(f"{one.fault}: nothing named it\n{one.output[-2000:]}")
    if one.equal is False:
        found.append(f"{one.fault}: the weights at the end are not those of an undisturbed run")
    if one.left:
        found.append(f"{one.fault} left {', '.join(one.left)}")
    return found


def table(rounds: list[Round], timeout: float) -> Table:
    made = new_table(
        f"to be named within {NAMED:g} s, a hang within {timeout + NAMED:g} s, and gone on with within {RESUMED:g} s",
        ("fault",),
        ("rounds", "named\ns, worst", "resumed\ns, worst", "steps\nlost", "weights\nequal", "left"),
        ("what",),
    )
    for name in dict.fromkeys(one.fault for one in rounds):
        of = [one for one in rounds if one.fault == name]
        equal = [one.equal for one in of if one.equal is not None]
        made.add_row(
            name,
            str(len(of)),
            worst([one.named for one in of]),
            worst([one.resumed for one in of]),
            f"{statistics.median(one.lost for one in of):g}",
            f"{sum(equal)}/{len(equal)}" if equal else "-",
            str(sum(len(one.left) for one in of)),
            BY_NAME[name].what,
        )
    return made


def worst(seconds: list[float | None]) -> str:
    known = [s for s in seconds if s is not None]
    return f"{max(known):.1f}" if known else "-"
