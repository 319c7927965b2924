"""`lockstep export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.checkpoint.checkpoints import CHECKPOINTS
from lockstep.cli.arguments import ReadsRun
from lockstep.cli.parsing import check_output, parse
from lockstep.errors import UserError
from lockstep.inference.export import export_hf, export_weights


@dataclass
class ExportArguments(ReadsRun):
    """Write a run's weights to one safetensors file for other tools: lockstep export RUN, a run's folder or one of its
    checkpoints, whatever strategy and number of ranks saved it. LoRA's adapters are merged into the weights.

    For example:

    lockstep export runs/gpt

    lockstep export runs/gpt/checkpoints/step-00000100 --out weights.safetensors

    lockstep export runs/gpt --format hf --out gpt-hf        # AutoModelForCausalLM.from_pretrained("gpt-hf")

    The file is imported again by --train.weights, and by lockstep generate where it lies in a run's folder.
    """

    out: str | None = None
    """The file to write. None: model.safetensors in the run's folder. With --format hf a folder; None: hf, in it."""
    format: Literal["safetensors", "hf"] = "safetensors"
    """hf: a folder that Hugging Face's transformers load, of a GPT (as GPT-2 or Llama) or of a model of theirs."""


def main(argv: list[str]) -> int:
    source = argv[0] if argv and not argv[0].startswith("-") else None
    arguments = parse(ExportArguments, argv[1:] if source is not None else argv, "export RUN")
    if source is None:
        raise UserError("lockstep export needs a run: lockstep export runs/NAME")
    if not Path(source).is_dir():
        raise UserError(f"{source} is not a folder; give a run's folder, or one of its checkpoints")
    is_checkpoint = (Path(source) / "manifest.json").exists()
    home = Path(source).parent.parent if is_checkpoint else Path(source)
    if arguments.format == "hf":
        folder = Path(arguments.out or home / "hf")
        print(f"{export_hf(Path(source), folder, arguments.consent)} tensors in {folder}/")
        return 0
    target = Path(arguments.out or home / "model.safetensors")
    check_output("--out", str(target))
    imported = not (home / CHECKPOINTS).exists()  # by lockstep import: there is nothing but this file
    if imported and target.resolve() == (home / "model.safetensors").resolve():
        raise UserError(f"{source} is {target} already; give --out, another file, or --format hf")
    count = export_weights(Path(source), target, arguments.consent)
    print(f"{count} tensors, {target.stat().st_size / 1e6:,.1f} MB in {target}")
    return 0
