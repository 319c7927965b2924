"""`lockstep generate`."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.cli.arguments import parse
from lockstep.errors import UserError
from lockstep.training.export import load_model
from lockstep.training.generate import Engine, check_generates, generate, through_deepspeed


@dataclass
class GenerateArguments:
    """Write text with a trained GPT: lockstep generate RUN, a run's folder, one of its checkpoints, or an exported
    .safetensors file that lies in a run's folder.

    For example:

    lockstep train configs/gpt_text.yaml --checkpoint.every 100 --run-dir runs/gpt

    lockstep generate runs/gpt --prompt "def main" --tokens 200

    lockstep generate runs/gpt --prompt "import " --engine deepspeed
    """

    prompt: str = "def "
    tokens: int = 200
    """How many to write. A token is a byte."""
    temperature: float = 0.0
    """0: always the likeliest token; 1: as likely as the model thinks."""
    top_k: int | None = None
    """Choose among the likeliest only."""
    seed: int = 0
    """Of the choices at a temperature above 0."""
    engine: Engine = "plain"
    """plain PyTorch, or DeepSpeed's inference engine."""
    device: str = "auto"
    """auto: a GPU where there is one; cpu; cuda."""


def main(argv: list[str]) -> int:
    source = argv[0] if argv and not argv[0].startswith("-") else None
    arguments = parse(GenerateArguments, argv[1:] if source is not None else argv, "generate RUN")
    if source is None:
        raise UserError("lockstep generate needs a run: lockstep generate runs/NAME")
    for flag, value, least in (("tokens", arguments.tokens, 1), ("temperature", arguments.temperature, 0)):
        if value < least:
            raise UserError(f"--{flag} is {value:g}, but it must be {least} or more")
    if not Path(source).exists():
        raise UserError(f"{source} does not exist; give a run's folder, a checkpoint, or a .safetensors file")
    if not arguments.prompt:
        raise UserError("--prompt is empty, but the model goes on from at least one byte")
    model, _, dataset = load_model(Path(source))
    check_generates(model)
    if dataset.spec.classes < 256:
        raise UserError(f"{source} was trained on tokens that are no text (data.name {dataset.name})")
    device = "cuda" if arguments.device != "cpu" and torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    if arguments.engine == "deepspeed":
        model = through_deepspeed(model)
    prompt = torch.tensor(list(arguments.prompt.encode()), dtype=torch.long)
    text = generate(model, prompt, arguments.tokens, arguments.temperature, arguments.top_k, arguments.seed)
    sys.stdout.buffer.write(bytes(text.tolist()) + b"\n")
    return 0
