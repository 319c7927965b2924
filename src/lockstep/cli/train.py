"""`lockstep train`."""

import os
import shlex
import signal
import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from lockstep.cli.arguments import RunArguments
from lockstep.cli.checks import check_before_ranks, check_paths, device_type
from lockstep.cli.flags import config_from, sections, without_flag
from lockstep.cli.parsing import parse
from lockstep.config import Config, Planned
from lockstep.errors import RankError, UserError
from lockstep.launch import Launch, adopt_environment, run_on_ranks
from lockstep.launch.keep_going import run_keeping_going
from lockstep.strategies.hand_over import check_keeps_going
from lockstep.training.attempt import note_if_gone
from lockstep.training.keep_going import train_keeping_going
from lockstep.training.loop import train_in_folder
from lockstep.training.out_of_memory import RAN_OUT
from lockstep.training.result import TrainResult
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

    lockstep train configs/digits_cnn.yaml --nproc 2 --checkpoint.every 100 --max-restarts 3

    lockstep train --model.name gpt --data.name text --train.optimizer adamw --train.lr 1e-3 --train.steps 200

    deepspeed --num_gpus=4 --module lockstep train configs/digits_cnn.yaml --deepspeed_config my.json

    torchrun --nproc_per_node=4 -m lockstep train configs/digits_cnn.yaml --parallel.data ddp
    """

    run_dir: str | None = None
    """Folder of this run. None: runs/TIME-MODEL-DATA-STRATEGY."""
    resume: str | None = None
    """Go on from a run's folder or one of its checkpoints; `auto`: from --run-dir, or from the newest run of this
    model and data, of the same sizes, that has a checkpoint, and from the start if there is none."""
    max_restarts: int = 0
    """When a rank fails or is killed, start all ranks anew, at most so often; they go on from the newest whole
    checkpoint of the run. Under torchrun, give its own --max-restarts."""
    keep_going: bool = False
    """When a rank fails or is killed, the others go on at once, with the same global batch, from the step that was
    under way; another one is started in its place, and joins them. For ranks on this machine's CPUs that each hold a
    whole copy (naive, flat, overlap, bucketed), over shared memory."""
    trust: bool = False
    """Run the code that a config.yaml of a run's folder names (imports); it may be a stranger's."""


def main(argv: list[str]) -> int:
    config, rest = config_from(for_deepspeed(argv))
    arguments = parse(TrainArguments, rest, "train", default=TrainArguments(**sections(config)))
    config = arguments.config()
    check_before_ranks(config, arguments.launch, default_nproc=1)
    if arguments.max_restarts < 0:
        raise UserError(f"--max-restarts is {arguments.max_restarts}, but it must be 0 or more")
    if arguments.keep_going:
        check_keep_going(arguments)
    if arguments.max_restarts and adopt_environment():
        raise UserError("--max-restarts is for ranks that lockstep starts; give it to torchrun, before -m lockstep")
    check_paths(("--run-dir", arguments.run_dir), ("--resume", arguments.resume))
    start_from_import(arguments, config)
    asked = config, arguments.run_dir, arguments.resume
    try:
        result: TrainResult = (
            run_keeping_going(train_keeping_going, *asked, launch=arguments.launch)
            if arguments.keep_going
            else run_on_ranks(
                train_in_folder,
                *asked,
                launch=arguments.launch,
                saves_when_stopped=True,
                max_restarts=arguments.max_restarts,
            )
        )[0]
    except RankError:
        for run in [Path(arguments.run_dir)] if arguments.run_dir else Path("runs").glob("*"):
            note_if_gone(run)
        raise
    except UserError as mistake:
        if RAN_OUT not in str(mistake):
            raise
        ranks = int(os.environ.get("WORLD_SIZE") or arguments.launch.nproc or 1)
        raise UserError("\n".join([str(mistake), *beyond(config, ranks, arguments.launch)])) from mistake
    return print_outcome(result, argv, config.plan) if result.is_main else status_of(result)


def check_keep_going(arguments: TrainArguments) -> None:
    """Refuse what --keep-going cannot do, before any rank starts."""
    launch = arguments.launch
    if adopt_environment():
        raise UserError("--keep-going is for ranks that lockstep starts; leave it out under torchrun and srun")
    if arguments.max_restarts:
        raise UserError(
            f"--keep-going starts lost ranks again by itself, as often as it takes; leave --max-restarts "
            f"{arguments.max_restarts} out"
        )
    if device_type(launch) != "cpu" or sys.platform != "linux":
        raise UserError("--keep-going is for CPU ranks of one Linux machine; give --device cpu, or use --max-restarts")
    if launch.backend not in (None, "shm"):
        raise UserError(f"--keep-going is for ranks that share memory, and --backend is {launch.backend}; leave it out")
    if (launch.nproc or 1) < 2:
        raise UserError(
            f"--keep-going needs another rank that goes on, and --nproc is {launch.nproc or 1}; give 2 or more"
        )
    check_keeps_going(arguments.config())


def start_from_import(arguments: TrainArguments, config: Config) -> None:
    """--resume of a folder that lockstep import has made: it has weights and no step yet."""
    folder = Path(arguments.resume or "")
    weights = folder / "model.safetensors"
    if arguments.resume in (None, "auto") or (folder / "checkpoints").is_dir() or not weights.is_file():
        return
    if config.train.weights is None:
        config.train.weights = str(weights)
    arguments.run_dir, arguments.resume = arguments.run_dir or str(folder), None
    if os.environ.get("RANK", "0") == "0":
        print(f"{folder} has no checkpoint yet: this run starts at the beginning, with {config.train.weights}")


def beyond(config: Config, ranks: int, launch: Launch) -> list[str]:
    """What the planner says of a run that ran out of memory."""
    import torch

    from lockstep.plan.smaller import smaller

    line = smaller(config, ranks, launch.device != "cpu" and torch.cuda.is_available())
    return [] if line is None else [line]


def status_of(result: TrainResult) -> int:
    """0: what was asked for was done. 1: the last checkpoint is missing. 128 and the signal's number: saved, and to be
    gone on with, as a requeue wants to know; but to torchrun that would be a failure, and it would start the run anew.
    """
    if result.not_saved is not None:
        return 1
    if not result.stopped or "TORCHELASTIC_RUN_ID" in os.environ:
        return 0
    return 128 + (signal.SIGINT if result.stopped_by == "Ctrl-C" else signal.Signals[result.stopped_by])


def print_outcome(result: TrainResult, argv: list[str], plan: Planned) -> int:
    """Say how the run has ended and how to go on; the exit status is 0 only if all is there that it should leave."""
    taken = counted(result.steps - result.resumed_at, "step") + (
        f", up to {result.steps}," if result.resumed_at else ""
    )
    for line in [*summary(result, taken), *beside_the_plan(result, plan)]:
        print(line, flush=True)  # into a file too, errors come behind them
    if result.not_saved is not None:
        ended = f"stopped by {result.stopped_by}, and " if result.stopped else ""
        print(f"error: {ended}the last checkpoint was not saved: {result.not_saved}", file=sys.stderr)
        return status_of(result)
    if result.stopped:
        print(f"stopped by {result.stopped_by} and saved")
    print(to_go_on(result, argv))
    return status_of(result)


def to_go_on(result: TrainResult, argv: list[str]) -> str:
    """The command that goes on with this run, or what was missing for it."""
    if result.saved_at < 0 and result.folder is not None and (result.folder / "checkpoints").is_dir():
        return "nothing was saved in this part of the run: with --checkpoint.every N one can go on from its end"
    if result.saved_at < 0:
        return "no checkpoint was asked for: with --checkpoint.every N one can go on from a run, export and generate"
    command = without_flag(argv, "--resume", "--run-dir")
    if not result.stopped:
        command = [*without_flag(command, "--train.steps", "--train.epochs"), "--train.steps", str(2 * result.steps)]
    until = "" if result.stopped else f", here for {counted(result.steps, 'step')} more"
    started = "... -m lockstep" if adopt_environment() else "lockstep"  # by torchrun or srun, with flags of theirs
    return f"go on{until}: {started} train {shlex.join(command)} --resume {shlex.quote(str(result.folder))}"


def beside_the_plan(result: TrainResult, plan: Planned) -> list[str]:
    """What lockstep plan had predicted, where it wrote the config."""
    if plan.step_ms is None or not result.spent.steps:
        return []
    step = 1e3 * result.spent.training / result.spent.steps
    said = f"predicted: a step of {plan.step_ms:.1f} ms, measured {step:.1f} ms ({step / plan.step_ms - 1:+.0%})"
    if plan.memory_gib is not None:
        said += f"; memory {plan.memory_gib:.2f} GiB, measured {result.memory / 2**30:.2f} GiB"
    return [f"{said}; lockstep plan learn {result.folder} improves the machine file"]


def summary(result: TrainResult, taken: str) -> list[str]:
    """What was reached, how fast, where the time went, and where everything is."""
    lines = []
    reached = f"reached: train loss {result.loss:.4f}"
    if isfinite(result.test_loss):
        loss, step = result.best or (result.test_loss, result.steps)
        at = "" if loss >= result.test_loss else f"; the lowest was {loss:.4f}, at step {step:,}"
        reached += f", test loss {result.test_loss:.4f}{at}"
    if result.steps > result.resumed_at:
        lines.append(reached)
    if result.gave_up:
        lines.append("stopped early: train.patience evaluations in a row have found no lower test loss")
    split = result.spent.split()
    total = sum(split.values()) or 1.0
    shares = ", ".join(f"{what} {s:.1f} s ({s / total:.1%})" for what, s in split.items() if s >= total / 1000)
    lines.append(f"{taken} in {result.seconds:.1f} s; {result.rate} without evaluation and saving")
    lines.append(f"time: {shares}")
    if split["compute"]:
        over = split["communication"] / split["compute"]
        lines.append(f"communication that was waited for, over compute: {over:.1%}")
    gone = result.folder is not None and not result.folder.exists()
    where = f"the run's folder {result.folder}/ is gone" if gone else f"metrics and config in {result.folder}/"
    lines.append(f"peak memory of a rank: {result.memory / 2**30:.2f} GiB; {where}")
    return lines


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
