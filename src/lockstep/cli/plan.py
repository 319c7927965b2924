"""`lockstep plan`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from lockstep.cli.flags import config_from
from lockstep.cli.parsing import check_output, parse
from lockstep.cli.plan_tables import as_row, show
from lockstep.cli.tables import write_rows
from lockstep.config import GPT, Config, Model, Planned, ResNet, check_ranges, save_config
from lockstep.config.gpt import SIZES
from lockstep.config.shipped import is_config
from lockstep.errors import UserError
from lockstep.plan import fp8
from lockstep.plan.describe import network_of_gpt, network_of_hf
from lockstep.plan.known import KNOWN, known_model
from lockstep.plan.layout import PlanLayout
from lockstep.plan.machine import Cluster, parse_cluster
from lockstep.plan.network import Network
from lockstep.plan.search import FIXABLE, WORKED_OUT, Answer, Question, ScoredLayout, search
from lockstep.plan.software import COMPILED, OURS

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
    precision: Literal["bf16", "fp16", "fp8", "fp4", "fp32", "tf32"] | None = None
    """What layers compute in. None: what the config says, or bf16."""
    compiled: bool = False
    """Elementwise kernels are fused (train.compile); a config says it itself."""
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
    is_file = given is not None and is_config(given)
    config, rest = config_from(argv if is_file or given is None else argv[1:], None if is_file else Config(model=GPT()))
    arguments = parse(PlanArguments, rest, "plan", default=PlanArguments(model=config.model))
    config.model = arguments.model
    check_ranges(Config(model=config.model))
    files = (("--json", arguments.json), ("--csv", arguments.csv), ("--out", arguments.out), ("--html", arguments.html))
    for flag, file in files:
        if file is not None:
            check_output(flag, file)
    network = network_asked_for(given if not is_file else None, arguments, config, is_file)
    batch = arguments.global_batch
    if batch is None:
        batch = config.train.batch_size if is_file else 512
    if arguments.top < 1:
        raise UserError(f"--top is {arguments.top}, but it must be 1 or more")
    compiled = arguments.compiled or (is_file and config.train.compile != "none")
    said = {"fp64": "fp32"}.get(config.train.precision, config.train.precision) if is_file else "bf16"
    precision = arguments.precision or said
    question = Question(
        *(network, parse_cluster(arguments.cluster), batch, precision),
        software=COMPILED if compiled else OURS,
        fixed=parse_fix(arguments.fix),
    )
    if is_file and precision == "fp8" and "tp" not in dict(question.fixed):
        question = replace(question, fixed=(*question.fixed, ("tp", 1)))  # ours does not go with it
    is_ours = is_file or (given is None and arguments.hf is None)
    if arguments.out is not None and not is_ours:
        raise UserError("--out writes configs of our own models; give a GPT (--model gpt) or a config file")
    everything = 400 if arguments.html is not None else WORKED_OUT
    answer = search(question, max(everything, arguments.top))
    if question.precision not in question.cluster.machine.peak_tflops:
        kind = question.cluster.machine.title
        print(f"note: {kind} has no units for {question.precision}; the next wider type is taken")
    tokens = parse_tokens(arguments.tokens) if arguments.tokens is not None else None
    show(answer, arguments.top, tokens, arguments.explain)
    if answer.plans and (line := fp8.advice(answer.best)) is not None:
        print(line)
    write(answer, arguments, config)
    return 0 if answer.plans else 1


def network_asked_for(given: str | None, arguments: PlanArguments, config: Config, is_file: bool) -> Network:
    if arguments.context is not None and arguments.context < 1:
        raise UserError(f"--context is {arguments.context}, but it must be 1 or more")
    if given is not None and arguments.hf is not None:
        raise UserError(f"{given} and --hf {arguments.hf} both say which model; leave one out")
    if arguments.hf is not None:
        return network_of_hf(Path(arguments.hf), arguments.context)
    if given is not None and ":" in given:
        return user_network(given, arguments)
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

        config = Config(model=ResNet(depth=int(size)))
        return network_of_config(config, DataSpec("images", (3, 224, 224), 1000))
    known = known_model(name)
    if known is None:
        names = ", ".join([*SIZES_OF_OURS, *KNOWN])
        raise UserError(f"{name} is no model that is known here; there are {names}; or give --hf, or a config")
    return known.with_context(context or known.context)


def user_network(path: str, arguments: PlanArguments) -> Network:
    import torch

    from lockstep.config.user_code import called
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
        elif value.isdigit() and len(value) < 10:
            found.append((name, bool(int(value)) if name == "offload" else int(value)))
        else:
            raise UserError(f"--fix {part}: {name} must be a whole number")
        if name not in ("recompute", "schedule") and not LEAST.get(name, 1) <= int(value) <= MOST.get(name, 10**9):
            raise UserError(f"--fix {part}: {name} must be from {LEAST.get(name, 1)} to {MOST.get(name, 10**9):,}")
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        raise UserError(f"--fix {text}: something is given twice")
    allowed = {"recompute": ("none", "attention", "every", "full"), "schedule": SCHEDULES}
    for name, value in found:
        if name in allowed and value not in allowed[name]:
            raise UserError(f"--fix {name}={value}: it must be one of {', '.join(allowed[name])}")
    return tuple(found)


LEAST, MOST = {"zero": 0, "shard": 0, "offload": 0}, {"zero": 3, "offload": 1}
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


def write(answer: Answer, arguments: PlanArguments, config: Config) -> None:
    rows = [as_row(plan) for plan in answer.plans]
    shown = [as_row(plan) for plan in answer.shown(arguments.top)] if answer.plans else []
    if arguments.csv is not None:
        write_rows(shown, Path(arguments.csv))
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
        runnable = next((plan for plan in (answer.best, *answer.plans) if not_run(plan) is None), None)
        if runnable is None:
            raise UserError(f"--out: no layout that fits is one that lockstep train runs: {not_run(answer.best)}")
        save_config(as_config(config, runnable), Path(arguments.out))
        print(f"{arguments.out}: {train_command(answer.question.cluster, arguments.out)}")


def train_command(cluster: Cluster, config: str) -> str:
    """On one machine, or by torchrun on each of several."""
    if cluster.nodes == 1:
        return f"lockstep train {config} --nproc {cluster.gpus}"
    nodes = f"--nnodes={cluster.nodes} --nproc_per_node={cluster.per_node} --rdzv-endpoint=HOST:29500"
    return f"torchrun {nodes} -m lockstep train {config}"


def not_run(plan: ScoredLayout) -> str | None:
    """Why `lockstep train` does not run it; None: it does."""
    layout = plan.layout
    if plan.setting.precision == "fp8" and layout.tp > 1:
        return f"{layout} cuts layers by tp, which multiply in bf16, and this is fp8"
    if layout.ep > 1 and layout.ep % layout.tp:
        return f"{layout} spreads experts over {layout.ep} ranks, and that is no multiple of tp"
    if layout.is_hybrid and (layout.zero < 3 or layout.shards % layout.cp):
        return f"{layout} divides over {layout.shards} of {layout.dp * layout.cp} ranks, which zero3 alone does"
    return None


def as_config(config: Config, plan: ScoredLayout) -> Config:
    """What `lockstep train` runs."""
    from lockstep.strategies.table import hybrid_strategy, strategy_dividing  # torch

    layout: PlanLayout = plan.layout
    precision, machine = plan.setting.precision, plan.setting.machine
    cuts_model = max(layout.tp, layout.pp, layout.cp) > 1
    engine = strategy_dividing(layout.zero, cuts_model) if layout.dp * layout.cp > 1 else "single"
    parallel = replace(
        config.parallel,
        data=hybrid_strategy() if layout.is_hybrid else engine,
        sharding=cast(Any, "HYBRID_SHARD" if layout.is_hybrid else config.parallel.sharding),
        shard=layout.shards // layout.cp if layout.is_hybrid else None,
        replicate=layout.dp * layout.cp // layout.shards if layout.is_hybrid else None,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        cut_experts=False,
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
        precision=cast(Any, precision if precision in ("fp16", "fp32", *machine.peak_tflops) else "bf16"),
        recompute=layout.recompute if layout.recompute != "selective" else "every",
        compile="blocks" if plan.setting.software is COMPILED else config.train.compile,
    )
    planned = Planned(step_ms=1e3 * plan.time.seconds, memory_gib=plan.memory.gib, machine=plan.setting.machine.name)
    data = config.data
    if isinstance(config.model, GPT) and data.name == "digits":
        data = replace(data, name="synthetic", samples=max(data.samples, layout.global_batch))
    return replace(config, parallel=parallel, train=train, data=data, plan=planned)
