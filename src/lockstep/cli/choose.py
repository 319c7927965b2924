"""`lockstep choose`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.cli.parsing import parse, refuse_positional
from lockstep.cli.plan import SIZES_OF_OURS, known_network, not_run, train_command
from lockstep.cli.tables import console
from lockstep.config.shipped import shipped_configs
from lockstep.errors import UserError
from lockstep.plan.choose import choose
from lockstep.plan.describe import network_of_hf
from lockstep.plan.known import KNOWN
from lockstep.plan.machine import kinds, parse_cluster, usual_precision
from lockstep.words import duration

KNOWN_AS = {name.replace("-", "_") for name in KNOWN}


@dataclass
class ChooseArguments:
    """Which strategy for this model on these machines, with the command and the reason. What is not given as a flag is
    asked, on a terminal.

    For example:

    lockstep choose

    lockstep choose --model llama2-7b --cluster 1x8xa100-40 --global-batch 256

    lockstep choose --hf config.json --cluster 8x8xh100 --global-batch 512 --context 4096

    lockstep choose --model llama2-7b --cluster 1x1xa100-40 --finetune yes
    """

    model: str | None = None
    """gpt2-small to gpt2-xl, resnet50, llama2-7b, llama3-70b, ...; or give --hf."""
    hf: str | None = None
    """A Hugging Face config.json, or its folder."""
    cluster: str | None = None
    """NODESxGPUSxKIND, as 4x8xh100; or here."""
    global_batch: int | None = None
    """Samples of a step. None: 8 for each GPU."""
    context: int | None = None
    """Tokens of a sample. None: what the model says."""
    precision: Literal["bf16", "fp16", "fp8", "fp32"] | None = None
    """None: bf16 where the GPUs have it, else fp16."""
    finetune: Literal["yes", "no"] | None = None
    """Train adapters (LoRA) on frozen weights."""


def main(argv: list[str]) -> int:
    refuse_positional(argv, "choose")
    arguments = parse(ChooseArguments, argv, "choose")
    if arguments.hf is None and arguments.model is None:
        names = ", ".join([*SIZES_OF_OURS, *KNOWN])
        arguments.model = asked(f"Which model? ({names}) ", "--model", "llama2-7b")
    if arguments.cluster is None:
        question = f"On which machines? (4x8xh100; kinds: {', '.join(kinds())}) "
        arguments.cluster = asked(question, "--cluster", "1x8xh100")
    if arguments.finetune is None:
        given = asked("Is it fine-tuned, with adapters? (yes, no) ", "--finetune", "no")
        arguments.finetune = "yes" if given.lower().startswith("y") else "no"
    if arguments.hf is not None:
        network = network_of_hf(Path(arguments.hf), arguments.context)
    else:
        assert arguments.model is not None
        network = known_network(arguments.model, arguments.context)
    cluster = parse_cluster(arguments.cluster)
    batch = arguments.global_batch if arguments.global_batch is not None else 8 * cluster.gpus
    if arguments.context is not None and arguments.context < 1:
        raise UserError(f"--context is {arguments.context}, but it must be 1 or more")
    precision = arguments.precision or usual_precision(cluster.machine)
    if precision == "fp8" and arguments.finetune == "yes":
        raise UserError(
            "--precision fp8 does not go with --finetune yes: layers with adapters multiply in bf16; use bf16"
        )
    found = choose(network, cluster, batch, precision, arguments.finetune == "yes")
    screen = console()
    screen.print(f"[bold]{found.strategy}[/]: {found.reason}", soft_wrap=True, highlight=False)
    if found.plan is None:
        return 1
    low, high = found.plan.interval_s
    screen.print(
        f"a step takes {duration(found.plan.time.seconds)} ({duration(low)} to {duration(high)} in four of five such "
        f"predictions), {found.plan.memory.gib:.1f} of {cluster.machine.memory_gib:g} GiB per GPU; layout: "
        f"{found.plan.layout}",
        soft_wrap=True,
        highlight=False,
    )
    reason = not_run(found.plan)
    if found.plan.layout.ep > 1 and shipped_model(arguments.model) is None:
        reason = f"lockstep train spreads the experts of its own GPT ({', '.join(own_mixtures())})"
    if reason is not None:
        print(f"this is what one would run elsewhere: {reason}")
    else:
        model, remark = model_flags(arguments, network.context)
        run = f"--data.name synthetic --train.batch-size {batch} --train.precision {precision} --train.steps 50"
        print(f"{train_command(cluster, model)} {found.flags} {run}{remark}")
        print("(on made-up data, to see it run; lockstep plan CONFIG --out run.yaml writes flags into a config)")
    if found.fastest is not None:
        gain = found.plan.time.seconds / found.fastest.time.seconds - 1
        print(f"{gain:.0%} faster, and less simple: {found.fastest.layout} ({duration(found.fastest.time.seconds)})")
    model = arguments.model or f"--hf {arguments.hf}"
    flags = f"--cluster {arguments.cluster} --global-batch {batch} --context {network.context}"
    print(f"all layouts: lockstep plan {model} {flags}")
    return 0


def model_flags(arguments: ChooseArguments, context: int) -> tuple[str, str]:
    """Of `lockstep train`, for the model that was asked about; and what to say of it."""
    name = arguments.model or ""
    if arguments.hf is None and name.startswith("gpt2-"):
        return f"--model.name gpt --model.size {name[5:]} --model.context {context} --model.vocabulary 50304", ""
    config = shipped_model(name)
    if config is not None:
        return f"{config} --model.context {context}", ""
    if arguments.hf is None and name.startswith("resnet"):
        return f"--model.name resnet --model.depth {name[6:]} --data.shape 3 224 224 --data.classes 1000", ""
    folder = name
    if arguments.hf is not None:
        given = Path(arguments.hf)
        folder = str(given.parent if given.suffix == ".json" else given)
    remark = "" if Path(folder).is_dir() else f"   # {folder}/: its folder of Hugging Face's"
    return f"--model.name hf --model.path {folder} --model.context {context}", remark


def shipped_model(name: str | None) -> str | None:
    """The config of a published model: qwen3_30b_a3b for qwen3-30b."""
    wanted = (name or "").replace("-", "_")
    return next((config for config in shipped_configs() if wanted in KNOWN_AS and config.startswith(wanted)), None)


def own_mixtures() -> list[str]:
    return [config for known in KNOWN if (config := shipped_model(known)) is not None]


def asked(question: str, flag: str, example: str) -> str:
    """On a terminal; elsewhere a missing flag is a mistake."""
    if not sys.stdin.isatty():
        raise UserError(f"{flag} is missing, and there is no terminal to ask at; give it, as {flag} {example}")
    return input(question).strip() or example
