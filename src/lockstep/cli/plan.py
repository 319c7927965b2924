"""`lockstep plan`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from lockstep.cli.flags import config_from
from lockstep.cli.parsing import check_output, parse
from lockstep.config import GPT, Config, Model, ResNet, save_config
from lockstep.config import Plan as Planned
from lockstep.config.gpt import SIZES
from lockstep.errors import UserError
from lockstep.plan.describe import network_of_gpt, network_of_hf
from lockstep.plan.explain import explained, warnings
from lockstep.plan.known import KNOWN, known_model
from lockstep.plan.layout import Layout
from lockstep.plan.machine import parse_cluster
from lockstep.plan.memory import GIB
from lockstep.plan.network import Network
from lockstep.plan.search import FIXABLE, WORKED_OUT, Answer, Plan, Question, judge, least_gpus, neighbours, search
from lockstep.plan.software import COMPILED, OURS
from lockstep.words import counted, duration, three_figures

SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass
class PlanArguments:
    """Will it fit, which layout, how long is a step? Predicted from shapes and machines; nothing is run.

    First comes what is to be trained: a config (CONFIG.yaml), a module of your own (package.module:make), a known model
    (llama3-70b, deepseek-v3, ...), or nothing, and --model or --hf says it.

    For example:

    lockstep plan --model gpt --model.size 2.7b --cluster 4x8xh100 --global-batch 512 --context 2048

    lockstep plan llama3-70b --cluster 8x8xh100 --global-batch 1024 --context 8192 --tokens 15T --explain

    lockstep plan --hf config.json --cluster 128x8xh100 --global-batch 1536 --context 8192 --fix tp=8,pp=4

    lockstep plan configs/gpt_text.yaml --cluster here --out run.yaml

    lockstep plan my_package.nets:make_model --batch-shape 3 224 224 --cluster 2x8xa100-40 --global-batch 1024
    """

    model: Model = field(default_factory=GPT)
    cluster: str = "1x8xh100"
    """NODESxGPUSxKIND, GPUSxKIND, or here (what lockstep calibrate wrote). Kinds: those of plan/machines, or a file."""
    global_batch: int | None = None
    """Samples of a step. None: what the config says, or 512."""
    context: int | None = None
    """Tokens of a sample. None: what the model says."""
    hf: str | None = None
    """A Hugging Face config.json, or its folder."""
    batch_shape: tuple[int, ...] = ()
    """Of one sample, for a module of your own: 3 224 224. Whole numbers of a vocabulary: give --tokens-in."""
    tokens_in: bool = False
    """The module of your own reads token ids."""
    tokens: str | None = None
    """To train on in all: 300B, 15T. Says how many days and GPU-hours that takes."""
    precision: Literal["bf16", "fp16", "fp8", "fp4", "fp32", "tf32"] = "bf16"
    compiled: bool = False
    """Elementwise kernels are fused (train.compile)."""
    fix: str | None = None
    """What is decided already: tp=8,pp=4,recompute=full. Of dp, tp, pp, cp, ep, zero, chunks, micro_batch, recompute,
    schedule, shard, offload."""
    top: int = 10
    """How many layouts to show."""
    explain: bool = False
    """Print every term of the best one: its formula, its number, where the formula stands."""
    json: str | None = None
    """Write all that was worked out to this file."""
    csv: str | None = None
    """The layouts as a table."""
    out: str | None = None
    """Write a config that lockstep train runs, of the best layout (of a GPT of ours, or of the given config)."""
    html: str | None = None
    """Write a page on which all layouts can be looked at."""


def main(argv: list[str]) -> int:
    given = argv[0] if argv and not argv[0].startswith("-") else None
    is_file = given is not None and given.endswith((".yaml", ".yml"))
    config, rest = config_from(argv if is_file or given is None else argv[1:], None if is_file else Config(model=GPT()))
    arguments = parse(PlanArguments, rest, "plan", default=PlanArguments(model=config.model))
    config.model = arguments.model
    for flag, file in (("--json", arguments.json), ("--csv", arguments.csv), ("--out", arguments.out)):
        if file is not None:
            check_output(flag, file)
    network = network_asked_for(given if not is_file else None, arguments, config, is_file)
    batch = arguments.global_batch
    if batch is None:
        batch = config.train.batch_size if is_file else 512
    if arguments.top < 1:
        raise UserError(f"--top is {arguments.top}, but it must be 1 or more")
    question = Question(
        *(network, parse_cluster(arguments.cluster), batch, arguments.precision),
        software=COMPILED if arguments.compiled else OURS,
        fixed=parse_fix(arguments.fix),
    )
    is_ours = is_file or (given is None and arguments.hf is None)
    if arguments.out is not None and not is_ours:
        raise UserError("--out writes configs of our own models; give a GPT (--model gpt) or a config file")
    everything = 400 if arguments.html is not None else WORKED_OUT
    answer = search(question, max(everything, arguments.top))
    tokens = parse_tokens(arguments.tokens) if arguments.tokens is not None else None
    show(answer, arguments, tokens)
    write(answer, arguments, config)
    return 0 if answer.plans else 1


def network_asked_for(given: str | None, arguments: PlanArguments, config: Config, is_file: bool) -> Network:
    if arguments.context is not None and arguments.context < 1:
        raise UserError(f"--context is {arguments.context}, but it must be 1 or more")
    if arguments.hf is not None:
        return network_of_hf(Path(arguments.hf), arguments.context)
    if given is not None and ":" in given:
        return own_network(given, arguments)
    if given is not None:
        return known_network(given, arguments.context)
    model = config.model
    if isinstance(model, GPT):
        if arguments.context is not None:
            model.context = arguments.context
        if model.vocabulary is None:
            model.vocabulary = 50304
        return network_of_gpt(model)
    from lockstep.data import build_data
    from lockstep.plan.trace import network_of_config, spec_without_data

    spec = build_data(config).spec if is_file and config.data.name == "own" else spec_without_data(config)
    return network_of_config(config, spec)


SIZES_OF_OURS = (*(f"gpt2-{size}" for size in SIZES), "resnet18", "resnet50")


def known_network(name: str, context: int | None) -> Network:
    """By a name: GPT-2's sizes, ResNets, and what others have published."""
    if name in SIZES_OF_OURS:
        kind, size = (name[:4], name[5:]) if name.startswith("gpt2-") else (name[:6], name[6:])
        if kind == "gpt2":
            return network_of_gpt(GPT(size=cast(Any, size), context=context or 1024, vocabulary=50304))
        from lockstep.data import DataSpec
        from lockstep.plan.trace import network_of_config

        config = Config(model=ResNet(depth=cast(Any, int(size))))
        return network_of_config(config, DataSpec("images", (3, 224, 224), 1000))
    known = known_model(name)
    if known is None:
        names = ", ".join([*SIZES_OF_OURS, *KNOWN])
        raise UserError(f"{name} is no model that is known here; there are {names}; or give --hf, or a config")
    return known.with_context(context or known.context)


def own_network(path: str, arguments: PlanArguments) -> Network:
    import torch

    from lockstep.config.own import called
    from lockstep.plan.trace import traced

    if not arguments.batch_shape:
        raise UserError(f"{path} needs --batch-shape, the shape of one sample, as 3 224 224")
    dtype = torch.int64 if arguments.tokens_in else None
    return traced(lambda: called(path, "plan", {}), arguments.batch_shape, path, dtype)


def parse_fix(text: str | None) -> tuple[tuple[str, Any], ...]:
    found: list[tuple[str, Any]] = []
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part.strip().partition("=")
        name = {"mb": "micro_batch", "micro-batch": "micro_batch", "vpp": "chunks"}.get(name, name)
        if not equals or name not in FIXABLE:
            raise UserError(f"--fix {part}: give name=value, with one of {', '.join(FIXABLE)}")
        if name in ("recompute", "schedule"):
            found.append((name, value))
        elif value.isdigit():
            found.append((name, bool(int(value)) if name == "offload" else int(value)))
        else:
            raise UserError(f"--fix {part}: {name} must be a whole number")
    allowed = {"recompute": ("none", "attention", "every", "full"), "schedule": SCHEDULES}
    for name, value in found:
        if name in allowed and value not in allowed[name]:
            raise UserError(f"--fix {name}={value}: it must be one of {', '.join(allowed[name])}")
    return tuple(found)


SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


def parse_tokens(text: str) -> float:
    scale = SCALES.get(text[-1:].upper(), 0.0)
    number = text[:-1] if scale else text
    try:
        value = float(number) * (scale or 1.0)
    except ValueError:
        raise UserError(f"--tokens {text}: give a number, as 300B or 15T") from None
    if not 0 < value < 1e18:
        raise UserError(f"--tokens {text}: give a number above 0, as 300B or 15T")
    return value


# ---- what is shown ---------------------------------------------------------------------------------------------------


def show(answer: Answer, arguments: PlanArguments, tokens: float | None) -> None:
    from lockstep.cli.tables import console, new_table

    screen, question = console(), answer.question
    network = question.network
    screen.print(
        f"[bold]{network.name}[/]: {network.parameters / 1e9:.3g}B parameters, {network.depth} layers, "
        f"{network.flops_per_token() / 1e9:.3g} GFLOP per {'token' if network.context > 1 else 'sample'}; "
        f"{question.cluster} ({counted(question.cluster.gpus, 'GPU')}), global batch {question.global_batch:,} x "
        f"{network.context:,}, {question.precision}",
        soft_wrap=True,
        highlight=False,
    )
    if not answer.plans:
        nothing_fits(screen, answer)
        return
    unit = "tokens/s" if network.context > 1 else "samples/s"
    table = new_table(
        f"the {min(arguments.top, len(answer.plans))} fastest of {answer.fitting:,} layouts that fit, "
        f"of {answer.considered:,} that are legal",
        ("layout",),
        ("step", "80% of such\npredictions", unit, "MFU\n%", "GiB\nper rank"),
        ("", "bound by"),
    )
    for plan in answer.plans[: arguments.top]:
        low, high = plan.interval_s
        table.add_row(
            str(plan.layout),
            duration(plan.time.seconds),
            between(low, high),
            three_figures(plan.tokens_per_s),
            f"{100 * plan.mfu:.1f}",
            f"{plan.memory.gib:.1f}",
            plan.fits,
            plan.time.bound_by,
        )
    screen.print(table)
    best = answer.plans[0]
    parts = ", ".join(
        f"{name} {seconds / best.time.seconds:.0%}"
        for name, seconds in sorted(best.time.terms.items(), key=lambda item: -item[1])
        if seconds > 0.005 * best.time.seconds
    )
    screen.print(f"the best one's step: {parts}", highlight=False)
    held = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in best.memory.kinds.items() if size > 0.05 * GIB)
    screen.print(f"its memory, GiB, on stage {best.memory.stage}: {held}", highlight=False)
    if tokens is not None:
        days = best.days(tokens)
        screen.print(
            f"{three_figures(tokens / 1e9)}B tokens: {three_figures(days)} days, "
            f"{three_figures(24 * days * best.layout.ranks)} GPU-hours",
            highlight=False,
        )
    fewest = least_gpus(question)
    if fewest is not None:
        screen.print(f"the fewest GPUs that hold it: {fewest[0]:,} ({fewest[1].layout})", highlight=False)
    show_neighbours(screen, question, best)
    for line in warnings(best):
        screen.print(f"[yellow]note: {line}[/]", soft_wrap=True)
    if arguments.explain:
        show_terms(screen, best)


def between(low: float, high: float) -> str:
    """63.2 - 76.3 s"""
    first, second = duration(low), duration(high)
    same = first.split()[1] == second.split()[1]
    return f"{first.split()[0] if same else first} - {second}"


def nothing_fits(screen: Any, answer: Answer) -> None:
    question = answer.question
    screen.print("[red]no layout fits[/]" if answer.considered else "[red]no layout is legal[/]")
    for reason, count in answer.refused.most_common(5):
        screen.print(f"  {count:,} x {reason}")
    if answer.smallest is not None:
        plan = judge(question, answer.smallest)
        screen.print(
            f"the smallest needs {plan.memory.gib:.1f} of {question.cluster.machine.memory_gib:g} GiB: {plan.layout}; "
            f"take more GPUs, a smaller global batch, or --fix offload=1",
            soft_wrap=True,
        )


def show_neighbours(screen: Any, question: Question, best: Plan) -> None:
    from lockstep.cli.tables import new_table

    table = new_table("one step away from the best", ("change",), ("step", "of the\nbest", "GiB"), ("",))
    for words, found in neighbours(question, best):
        if isinstance(found, str):
            table.add_row(words, "-", "-", "-", found)
        else:
            ratio = found.time.seconds / best.time.seconds
            table.add_row(words, duration(found.time.seconds), f"{ratio:.2f}", f"{found.memory.gib:.1f}", found.fits)
    screen.print(table)


def show_terms(screen: Any, best: Plan) -> None:
    from lockstep.cli.tables import new_table

    table = new_table(f"every term of {best.layout}", ("term",), ("number",), ("formula", "stands in"))
    for row in explained(best):
        table.add_row(*row)
    screen.print(table)
    screen.print("constants: plan/constants.yaml, each with what it stands for; docs/planning.md", highlight=False)


def as_row(plan: Plan) -> dict[str, Any]:
    layout, (low, high) = plan.layout, plan.interval_s
    fields = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "cp", "ep", "zero", "shard", "schedule")}
    fields |= {name: getattr(layout, name) for name in ("chunks", "micro_batch", "recompute", "offload")}
    return {
        "layout": str(layout),
        **fields,
        "step_s": plan.time.seconds,
        "low80_s": low,
        "high80_s": high,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "peak_gib": plan.memory.gib,
        "fits": plan.fits,
        "bound_by": plan.time.bound_by,
        **{f"{name}_s": seconds for name, seconds in plan.time.terms.items()},
        **{f"{kind}_gib": size / GIB for kind, size in plan.memory.kinds.items()},
    }


def write(answer: Answer, arguments: PlanArguments, config: Config) -> None:
    rows = [as_row(plan) for plan in answer.plans]
    if arguments.csv is not None:
        from lockstep.cli.tables import write_rows

        write_rows(rows[: max(arguments.top, 1)], Path(arguments.csv))
    if arguments.json is not None:
        from lockstep.results.record import Record

        refused = [{"reason": reason, "layouts": count} for reason, count in answer.refused.most_common()]
        result = {"rows": rows, "considered": answer.considered, "fitting": answer.fitting, "refused": refused}
        Record("plan", result, title=f"{answer.question.network.name} on {answer.question.cluster}").write(
            Path(arguments.json)
        )
    if arguments.html is not None and answer.plans:
        from lockstep.plan.page import write_page

        write_page(answer, Path(arguments.html))
        print(f"the page: {arguments.html}")
    if arguments.out is not None:
        if not answer.plans:
            raise UserError("--out: there is no layout that fits, so there is no config to write")
        runnable = next((plan for plan in answer.plans if plan.layout.ep == 1), None)
        if runnable is None:
            raise UserError("--out: every layout that fits spreads experts, which lockstep train does not do")
        save_config(as_config(config, runnable), Path(arguments.out))
        print(f"{arguments.out}: lockstep train {arguments.out} --nproc {runnable.layout.ranks}")


ENGINES = {0: "bucketed", 1: "zero1", 2: "zero2", 3: "zero3"}


def as_config(config: Config, plan: Plan) -> Config:
    """What `lockstep train` runs."""
    layout: Layout = plan.layout
    engine = ENGINES[layout.zero] if layout.dp * layout.cp > 1 else "single"
    parallel = replace(
        config.parallel,
        data=engine,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        sequence=layout.tp > 1 and layout.sequence,
        schedule=cast(Any, layout.schedule if layout.pp > 1 else config.parallel.schedule),
        chunks=layout.chunks if layout.pp > 1 else config.parallel.chunks,
        micro_batches=layout.micro_batches if layout.pp > 1 else config.parallel.micro_batches,
        offload="cpu" if layout.offload and layout.zero else config.parallel.offload,
    )
    train = replace(
        config.train,
        batch_size=layout.global_batch,
        accumulation=1 if layout.pp > 1 else layout.micro_batches,
        precision=cast(Any, plan.setting.precision if plan.setting.precision in ("fp16", "fp32") else "bf16"),
        recompute=layout.recompute if layout.recompute != "selective" else "every",
        compile="blocks" if plan.setting.software is COMPILED else config.train.compile,
    )
    planned = Planned(step_ms=1e3 * plan.time.seconds, memory_gib=plan.memory.gib, machine=plan.setting.machine.name)
    data = config.data
    if isinstance(config.model, GPT) and data.name == "digits":
        data = replace(data, name="synthetic", samples=max(data.samples, layout.global_batch))
    return replace(config, parallel=parallel, train=train, data=data, plan=planned)
