"""`lockstep verify`."""

import os
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import tyro

from lockstep.cli.arguments import LinkFlag
from lockstep.cli.checks import device_type, over_link
from lockstep.cli.flags import config_from, flag_value
from lockstep.cli.parsing import parse
from lockstep.cli.tables import console, new_table
from lockstep.config import CNN, Config, Data, Model, Own, Train, check_ranges
from lockstep.errors import UserError
from lockstep.launch import Launch, adopt_environment, run_on_ranks
from lockstep.strategies import strategy_names
from lockstep.verify import Request, Verdict, check_request, preset, verify
from lockstep.verify.cost import MODEL_AXES
from lockstep.verify.presets import Matrix
from lockstep.words import counted


@dataclass
class VerifyArguments:
    """Hold strategies against one process: loss, accuracy, gradients, their norm, weights, evaluation; then their
    traffic, the order of their communication and what they hold in memory against laws.

    Equality is shown in float64 to 1e-10 (float32: 1e-5) of each tensor's norm, on even, uneven and accumulated
    batches, with weights that are not looked at and messages that come late. By hand and unless a model is given also:
    a plain loop, ranks that use other parameters, dropout, save and resume. Strategies that approximate by nature are
    held to a law of their own. The exit status is 1 if anything fails.

    For example:

    lockstep verify

    lockstep verify --preset hybrids
    lockstep verify --preset experts
    lockstep verify --strategies zero1 fsdp,tp=2 --world-size 4 --train.optimizer muon

    lockstep verify --strategies bucketed ddp --world-size 3 --steps 50

    lockstep verify --cost --strategies zero3 zero1,pp=2:zb-h1 --world-size 4

    lockstep verify --savers --strategies zero3 fsdp --world-size 2

    lockstep verify --model.name resnet --model.norm group --model.width 8 --strategies bucketed

    lockstep verify --model.import my_package.nets:Net --data.import my_package.data:make --strategies zero3
    """

    strategies: tuple[str, ...] = ()
    """Names, or all (of data parallelism), instead of a preset. A + adds an option (bucketed+topk), a comma an axis
    (zero3,tp=2)."""
    preset: str = "standard"
    """standard: every data strategy and every axis at 2 ranks, pairs of axes at 4, three at 8. data: every data
    strategy at 2 and 4 ranks. hybrids: every axis with every kind of engine, at 2, 4 and 8 ranks. experts: blocks with
    experts. optimizers: Muon. precision: products in FP8."""
    world_size: tuple[int, ...] = ()
    """Numbers of ranks; without --preset and --strategies, of every data strategy. Default: the preset's, or 2 and 4
    for --strategies. Under torchrun: that of torchrun."""
    steps: int = 4
    precision: Literal["fp64", "fp32"] = "fp64"
    savers: bool = False
    """Verify the ways of saving memory with each strategy: activation checkpointing (full, every 2nd block, attention
    only), and LoRA; with gradient accumulation and clipping among them."""
    cost: bool = False
    """Show also what a step costs beside its laws: calls by axis, reductions issued early, what is held at once, how
    long a stage of a pipeline is idle. A law that is broken fails with or without it."""
    link: LinkFlag = None
    launch: Annotated[Launch, tyro.conf.arg(name="")] = field(default_factory=Launch)
    model: Model = field(default_factory=CNN)
    """Verify with this model. Without a --model flag: a small CNN and a small GPT."""
    data: Data = field(default_factory=Data)
    """For a model of your own, and its loss: the data to verify it with."""
    train: Train = field(default_factory=Train)


def main(argv: list[str]) -> int:
    config, rest = config_from(argv)
    given = VerifyArguments(model=config.model, data=config.data, train=config.train)
    arguments = parse(VerifyArguments, rest, "verify", default=given)
    user_model = len(rest) < len(argv) or any(word.startswith("--model.") for word in rest)
    check_ranges(Config(model=arguments.model))
    request = Request([], arguments.steps, arguments.model if user_model else None, arguments.precision)
    request.savers = arguments.savers
    if flag_value(rest, "--train.optimizer") is not None:
        request.optimizer = arguments.train.optimizer
    if arguments.preset == "optimizers":
        request.optimizer = request.optimizer or "muon"
    if arguments.preset in ("experts", "optimizers", "precision"):
        request.experts, request.float8 = arguments.preset == "experts", arguments.preset == "precision"
        request.only_values = True
        if request.float8 and (user_model or arguments.savers or arguments.precision != "fp64"):
            raise UserError(
                "--preset precision has models of its own, in fp64, where one digit more or less changes no rounding; "
                "leave --model, --savers and --precision out"
            )
        request.steps = arguments.steps if flag_value(rest, "--steps") is not None else 3
    refuse_other_settings(rest, arguments.model)
    if isinstance(arguments.model, Own):
        request.own = Config(arguments.model, arguments.data, arguments.train)
        check_ranges(request.own)
    if arguments.link is not None:
        return over_link("verify", arguments.link, argv, arguments.launch)
    launch = arguments.launch
    matrix = chosen(arguments, request, rest)
    for size, names in matrix.items():
        check_request(replace(request, strategies=names), size, device_type(launch))
    verdicts: list[Verdict] = []
    for size, names in matrix.items():
        asked = replace(request, strategies=names)
        verdicts += run_on_ranks(verify, asked, launch=launch, default_nproc=size, start_method="forkserver")[0]
    if os.environ.get("RANK", "0") == "0":
        print_verdicts(verdicts, request)
        if arguments.cost:
            print_costs(verdicts)
    return 0 if all(v.passed for v in verdicts) else 1


def refuse_other_settings(rest: list[str], model: Model) -> None:
    """Of `train` only some are read here: the proof has batches, rates and clipping of its own."""
    read = ["--train.optimizer", *(["--train.loss"] if isinstance(model, Own) else [])]
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--train.") and flag not in read:
            raise UserError(
                f"lockstep verify has settings of its own for {flag}; of train it reads {' and '.join(read)}"
            )


def chosen(arguments: VerifyArguments, request: Request, rest: list[str]) -> Matrix:
    """Which strategies at how many ranks."""
    launch, given = arguments.launch, flag_value(rest, "--world-size") is not None
    sizes = arguments.world_size
    if launch.nproc is not None:
        if given:
            raise UserError("--nproc and --world-size both say how many ranks to verify with; leave one out")
        sizes = (launch.nproc,)
    if adopt_environment():
        sizes = (int(os.environ["WORLD_SIZE"]),)
    if (given and not sizes) or (flag_value(rest, "--strategies") is not None and not arguments.strategies):
        flag = "--world-size" if given else "--strategies"
        raise UserError(f"{flag} has nothing to verify behind it; give some, or leave it out")
    if sizes and min(sizes) < 1:
        raise UserError(f"--world-size is {min(sizes)}, but it must be 1 or more")
    if arguments.strategies and flag_value(rest, "--preset") is not None:
        raise UserError("--strategies and --preset both say what to verify; leave one out")
    asked = flag_value(rest, "--preset") is not None
    if arguments.strategies or (not asked and (sizes or not request.is_whole)):
        names = [n for n in strategy_names(arguments.strategies or ("all",)) if n != "single"]
        if not names:
            raise UserError("--strategies single is one process, which the others are held against; name another")
        return dict.fromkeys(sizes or (2, 4), names)
    found = preset(arguments.preset)
    if not sizes:
        return found
    if missing := [size for size in sizes if size not in found]:
        have = ", ".join(map(str, found))
        raise UserError(f"--preset {arguments.preset} has nothing for {missing[0]} ranks; it has {have}")
    return {size: found[size] for size in sizes}


def print_verdicts(verdicts: list[Verdict], request: Request) -> None:
    screen = console()
    table = new_table(
        f"against one process, {counted(request.steps, 'step')}, {request.precision}",
        ("", "strategy"),
        ("ranks", "Δ loss", "Δ grad", "Δ weight", "calls\n/step", "kB sent\n/step", "kB by\ntheory"),
        ("held to",),
    )
    for v in verdicts:
        compared = bool(v.comparisons)
        deltas = [f"{v.worst(f):.0e}" if compared else "-" for f in ("loss", "gradients", "weights")]
        sent = v.counted
        assert sent is not None
        table.add_row(
            "[green]✓[/]" if v.passed else "[red]✗[/]",
            v.strategy,
            str(v.world_size),
            *deltas,
            str(sent.collectives),
            f"{sent.wire_bytes / 1e3:.2f}",
            f"{v.expected.wire_bytes / 1e3:.2f}" if v.expected is not None else "-",
            v.law or "equality",
        )
    screen.print(table)
    for v in verdicts:
        for reason in v.failures:
            screen.print(f"[red]✗[/] {v.strategy}, {counted(v.world_size, 'rank')}: {reason}")
    models = {name: count for v in verdicts for name, count in v.models.items()}
    said = ", ".join(f"{name} of {count:,} parameters" for name, count in models.items())
    failed = sum(not v.passed for v in verdicts)
    screen.print(f"{len(verdicts) - failed} of {len(verdicts)} passed{f', with {said}' if said else ''}")


def print_costs(verdicts: list[Verdict]) -> None:
    """Counted, and after a slash what the law says; of the rank that is worst."""
    screen = console()
    table = new_table(
        "cost of a step, counted / by the law",
        ("strategy",),
        (
            "ranks",
            *("calls\ndata", "calls\ntp", "calls\ncp", "calls\npp"),
            *("issued\nearly", "gathered\nkB", "state\nkB", "micro-\nbatches", "idle"),
        ),
    )
    for v in verdicts:
        cost = v.cost
        calls = [cost.calls.get(axis) for axis in MODEL_AXES]
        table.add_row(
            v.strategy,
            str(v.world_size),
            *("" if one is None else f"{one[0]}/{'-' if one[1] is None else one[1]}" for one in calls),
            "" if cost.early is None else f"{cost.early[0]:g}/{cost.early[1]:g}",
            *("" if one is None else f"{one[0] / 1e3:.1f}/{one[1] / 1e3:.1f}" for one in (cost.gathered, cost.state)),
            *("" if one is None else f"{one[0]:g}/{one[1]:g}" for one in (cost.micro_batches, cost.idle)),
        )
    screen.print(table)
    screen.print(
        "calls: exactly. Issued early: reductions of gradients before the last backward ends, at least half of all.\n"
        "At most: gathered, parameters of other ranks at once; state, parameters, gradients and moments after a step;\n"
        "micro-batches that a stage holds at once; idle, of a stage, where a forward takes 1 and a backward 2.\n"
        "-: there is no law. Empty: not counted for this strategy."
    )
