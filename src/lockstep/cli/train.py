"""`lockstep train`."""

import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.cli.arguments import RunArguments, config_from, parse, sections
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.launch import run_on_ranks
from lockstep.training.checkpoint import CHECKPOINTS
from lockstep.training.loop import TrainResult, train
from lockstep.training.manifest import MANIFEST
from lockstep.words import counted


@dataclass
class TrainArguments(RunArguments):
    """Train a model on one process or many.

    A config file may come first: lockstep train CONFIG.yaml --flags. Flags win over the file, the file over the
    defaults shown here. Metrics (metrics.jsonl, TensorBoard) and the resolved config go to the run's folder.

    The model's flags are those of --model.name: lockstep train --model gpt --help shows gpt's.

    For example:

    lockstep train configs/digits_cnn.yaml --nproc 2

    lockstep train configs/digits_cnn.yaml --nproc 2 --checkpoint.every 100 --resume auto

    lockstep train --model.name gpt --data.name text --train.optimizer adamw --train.lr 1e-3 --train.steps 200

    deepspeed --num_gpus=4 --module lockstep train configs/digits_cnn.yaml --deepspeed_config my.json

    torchrun --nproc_per_node=4 -m lockstep train configs/digits_cnn.yaml --parallel.data ddp
    """

    run_dir: str | None = None
    """Folder of this run. None: runs/TIME-MODEL-DATA-STRATEGY."""
    resume: str | None = None
    """Go on from a run's folder or one of its checkpoints; `auto`: from --run-dir, or from the newest run of this
    model and data that has a checkpoint, and from the start if there is none."""


def main(argv: list[str]) -> int:
    config, rest = config_from(for_deepspeed(argv))
    arguments = parse(TrainArguments, rest, "train", default=TrainArguments(**sections(config)))
    config = arguments.config()
    folder, source = run_folders(config, arguments.run_dir, arguments.resume)
    result: TrainResult = run_on_ranks(train, config, folder, False, source, launch=arguments.launch)[0]
    if result.is_main:
        print(f"{counted(result.steps, 'step')} in {result.seconds:.1f} s; metrics and config in {folder}/")
        if result.stopped:
            print(f"stopped by SIGTERM and saved; go on with --resume {folder}")
    return 0


def for_deepspeed(argv: list[str]) -> list[str]:
    """What people type with DeepSpeed: --deepspeed, and --deepspeed_config FILE, which asks for it as well."""
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag == "--deepspeed":
            words += ["--parallel.data", "deepspeed"]
        elif flag in ("--deepspeed_config", "--deepspeed-config"):
            words += ["--parallel.data", "deepspeed", "--parallel.deepspeed-config" + equals + value]
        else:
            words.append(word)
    return words


def run_folders(config: Config, run_dir: str | None, resume: str | None) -> tuple[Path, Path | None]:
    """(the run's folder, what to resume from)."""
    task = f"{config.model.name}-{config.data.name}"
    new = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{task}-{config.parallel.data}"
    if resume is None:
        return Path(run_dir) if run_dir else new, None
    if resume == "auto":
        candidates = [Path(run_dir)] if run_dir else sorted(Path("runs").glob(f"*-{task}-*"), reverse=True)
        source = next((c for c in candidates if any((c / CHECKPOINTS).glob("step-*"))), None)
        return (Path(run_dir) if run_dir else source or new), source
    source = Path(resume)
    if not source.is_dir():
        raise UserError(f"--resume {resume}: there is no such folder; give a run's folder, a checkpoint, or auto")
    home = source.parent.parent if (source / MANIFEST).exists() else source
    return Path(run_dir) if run_dir else home, source
