"""`lockstep train`."""

import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.cli.arguments import RunArguments, config_from, parse, sections
from lockstep.launch import run_on_ranks
from lockstep.training import TrainResult, train


@dataclass
class TrainArguments(RunArguments):
    """Train a model on one process or many.

    A config file may come first: lockstep train CONFIG.yaml --flags. Flags win over the file, the file over the
    defaults shown here. Metrics (metrics.jsonl, TensorBoard) and the resolved config go to the run's folder.

    The model's flags are those of --model.name: lockstep train --model gpt --help shows gpt's.

    For example:

    lockstep train configs/digits_cnn.yaml --nproc 2

    lockstep train --model.name gpt --data.name text --train.optimizer adamw --train.lr 1e-3 --train.steps 200

    torchrun --nproc_per_node=4 -m lockstep train configs/digits_cnn.yaml --parallel.data ddp
    """

    run_dir: str | None = None
    """Folder of this run. None: runs/TIME-MODEL-DATA-STRATEGY."""


def main(argv: list[str]) -> int:
    config, rest = config_from(argv)
    arguments = parse(TrainArguments, rest, "train", default=TrainArguments(**sections(config)))
    config = arguments.config()
    name = f"{config.model.name}-{config.data.name}-{config.parallel.data}"
    folder = Path(arguments.run_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    result: TrainResult = run_on_ranks(train, config, folder, launch=arguments.launch)[0]
    if result.is_main:
        print(f"{result.steps} steps in {result.seconds:.1f} s; metrics and config in {folder}/")
    return 0
