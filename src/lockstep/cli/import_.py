"""`lockstep import`."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.cli.parsing import parse
from lockstep.errors import UserError
from lockstep.training.export import import_hf


@dataclass
class ImportArguments:
    """Make our GPT of a GPT-2's or a Llama's folder of Hugging Face's: lockstep import FOLDER --out NEW.

    For example:

    lockstep import gpt2/ --out runs/gpt2

    lockstep train runs/gpt2/config.yaml --train.weights runs/gpt2/model.safetensors --data.name text

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
    print(
        f"{config.model} in {arguments.out}/; train with lockstep train {arguments.out}/config.yaml --train.weights "
        f"{arguments.out}/model.safetensors"
    )
    return 0
