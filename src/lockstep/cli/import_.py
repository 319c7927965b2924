"""`lockstep import`."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.cli.parsing import parse
from lockstep.config import GPT
from lockstep.errors import UserError
from lockstep.inference.export import import_hf


@dataclass
class ImportArguments:
    """Make our GPT of a GPT-2's or a Llama's folder of Hugging Face's: lockstep import FOLDER --out NEW.

    For example:

    lockstep import gpt2/ --out runs/gpt2

    lockstep train runs/gpt2/config.yaml --resume runs/gpt2 --data.name text --checkpoint.every 100

    lockstep export runs/gpt2 --format hf --out back

    Other causal language models are trained as they are: lockstep train --model.name hf --model.path FOLDER.
    """

    out: str = ""
    """The folder to make: config.yaml and model.safetensors."""


def main(argv: list[str]) -> int:
    source = argv[0] if argv and not argv[0].startswith("-") else None
    arguments = parse(ImportArguments, argv[1:] if source is not None else argv, "import FOLDER")
    if source is None or not arguments.out:
        raise UserError("lockstep import needs a folder and where to: lockstep import gpt2/ --out runs/gpt2")
    config = import_hf(Path(source), Path(arguments.out))
    model = config.model
    assert isinstance(model, GPT), "that is what we make of them"
    sizes = f"{model.layers} layers, width {model.d_model}, {model.heads} heads, context {model.context}"
    print(f"a GPT of {sizes}, vocabulary {model.vocabulary} in {arguments.out}/")
    print(f"train it: lockstep train {arguments.out}/config.yaml --resume {arguments.out} --data.name text")
    return 0
