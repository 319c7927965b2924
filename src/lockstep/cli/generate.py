"""`lockstep generate`."""

import os
import sys
import time
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated

import torch
import tyro

from lockstep.cli.arguments import ReadsRun
from lockstep.cli.parsing import parse
from lockstep.errors import UserError
from lockstep.inference.deepspeed import check_shares_no_heads, through_deepspeed
from lockstep.inference.export import load_config_and_spec, load_model
from lockstep.inference.generate import Engine, check_generates, generate_batch
from lockstep.launch import Launch, run_on_ranks
from lockstep.layout.world import World
from lockstep.models import build_model
from lockstep.models.experts import mixtures_in
from lockstep.parallel.experts.expert_parallel import can_spread, expert_parallel
from lockstep.parallel.tensor.tensor_parallel import tensor_parallel
from lockstep.strategies.tensor import check_tensor
from lockstep.words import counted


@dataclass
class GenerateArguments(ReadsRun):
    """Write text with a trained GPT: lockstep generate RUN, a run's folder, one of its checkpoints, or an exported
    .safetensors file that lies in a run's folder.

    For example:

    lockstep train configs/gpt_text.yaml --checkpoint.every 100 --run-dir runs/gpt

    lockstep generate runs/gpt --prompt "def main" "import " --tokens 200

    lockstep generate runs/gpt --nproc 2

    lockstep generate runs/gpt --prompt "import " --engine deepspeed
    """

    launch: Annotated[Launch, tyro.conf.arg(name="")] = field(default_factory=Launch)
    prompt: tuple[str, ...] = ("def ",)
    """One or several, which are continued together."""
    tokens: int = 200
    """How many to write. A token is a byte."""
    temperature: float = 0.0
    """0: always the likeliest token; 1: as likely as the model thinks."""
    top_k: int | None = None
    """Choose among the likeliest only."""
    seed: int = 0
    """Of the choices at a temperature above 0."""
    cache: bool = True
    """Keep keys and values, so that a token costs one token's work. Without: the whole text again, each time."""
    engine: Engine = "plain"
    """plain PyTorch, or DeepSpeed's inference engine; both are tensor parallel on several ranks."""


def main(argv: list[str]) -> int:
    source = argv[0] if argv and not argv[0].startswith("-") else None
    arguments = parse(GenerateArguments, argv[1:] if source is not None else argv, "generate RUN")
    if source is None:
        raise UserError("lockstep generate needs a run: lockstep generate runs/NAME")
    for flag, value, least in (("tokens", arguments.tokens, 1), ("temperature", arguments.temperature, 0)):
        if not least <= value < inf:
            raise UserError(f"--{flag} is {value:g}, but it must be {least} or more")
    if not 0 <= arguments.seed < 2**63:
        raise UserError(f"--seed is {arguments.seed}, but it must be from 0 to {2**63 - 1}")
    if arguments.top_k is not None and arguments.top_k < 1:
        raise UserError(f"--top-k is {arguments.top_k}, but it must be 1 or more")
    if not Path(source).exists():
        raise UserError(f"{source} does not exist; give a run's folder, a checkpoint, or a .safetensors file")
    if not arguments.prompt or not all(arguments.prompt):
        raise UserError("--prompt is empty, but the model goes on from at least one byte")
    ranks = arguments.launch.nproc or 1
    if ranks > 1:
        config, spec, _ = load_config_and_spec(Path(source), arguments.consent)
        with torch.device("meta"):
            model = build_model(config.model, spec)
        check_tensor(model, ranks, sequence=False)
        if arguments.engine == "deepspeed":
            check_shares_no_heads(model, ranks)
            if mixtures_in(model):
                raise UserError("--engine deepspeed does not know experts; leave it out: --nproc spreads them")
    texts, seconds, ranks = run_on_ranks(write, arguments, source, launch=arguments.launch)[0]
    if os.environ.get("RANK", "0") == "0":
        for text in texts:
            sys.stdout.buffer.write(text + b"\n")
        sys.stdout.flush()
        written = arguments.tokens * len(texts)
        how = f"{counted(ranks, 'rank')}, {'with' if arguments.cache else 'without'} a key/value cache"
        print(f"{written:,} tokens in {seconds:.2f} s: {written / seconds:,.0f} tokens/s ({how})", file=sys.stderr)
    return 0


def write(world: World, arguments: GenerateArguments, source: str) -> tuple[list[bytes], float, int]:
    """The texts, how long it took to write them, and how many ranks did."""
    model, config, spec = load_model(Path(source), arguments.consent)
    check_generates(model)
    if spec.classes < 256:
        raise UserError(f"{source} was trained on tokens that are no text (data.name {config.data.name})")
    model = model.to(world.device).eval()
    check_tensor(model, world.size, sequence=False)  # under torchrun or srun no launcher has
    if arguments.engine == "deepspeed":
        model = through_deepspeed(model)
    elif world.size > 1:
        if can_spread(model, world.size):
            expert_parallel(model, same_tokens=True)
        tensor_parallel(model)
    prompts = [torch.tensor(list(os.fsencode(prompt)), dtype=torch.long) for prompt in arguments.prompt]
    start = time.perf_counter()
    texts = generate_batch(
        *(model, prompts, arguments.tokens, arguments.temperature, arguments.top_k, arguments.seed, arguments.cache),
        vocabulary=256,
    )
    written = [bytes(text.tolist()) for text in texts]
    return written, time.perf_counter() - start, world.size
