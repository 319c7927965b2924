"""`lockstep launch`."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lockstep.cli.parsing import check_output, parse
from lockstep.config import load_config
from lockstep.errors import UserError
from lockstep.launch.cluster import HOWS, Job, Place, chosen, script
from lockstep.results.whole import write_whole


@dataclass
class LaunchArguments(Place):
    """Write the script that starts a config on a cluster, and say what was chosen: lockstep launch
    slurm|torchrun|kubernetes|deepspeed CONFIG.

    For example:

    lockstep launch slurm configs/gpt_3d.yaml --nodes 4 --gpus 8 --time 12:00:00 --out job.sh

    lockstep launch slurm configs/digits_cnn.yaml --nodes 2 --ranks 2 --submit

    lockstep launch torchrun configs/fsdp_transformer.yaml --nodes 2 --gpus 8 --master node1

    lockstep launch kubernetes configs/fsdp_transformer.yaml --nodes 2 --gpus 8 --image registry/lockstep:1
    """

    out: str | None = None
    """Write it to this file. None: print it."""
    submit: bool = False
    """Hand it to sbatch or kubectl; start torchrun or deepspeed here."""


def main(argv: list[str]) -> int:
    words = [word for word in argv[:2] if not word.startswith("-")]
    if {"-h", "--help"} & set(argv):
        parse(LaunchArguments, ["--help"], "launch HOW CONFIG")
    if len(words) < 2 or words[0] not in HOWS:
        given = f", but was given {' '.join(argv[:2])!r}" if argv else ""
        raise UserError(f"lockstep launch takes one of {', '.join(HOWS)} and a config file{given}")
    how, file = words
    arguments = parse(LaunchArguments, argv[2:], "launch HOW CONFIG")
    check(arguments)
    job = Job(file, load_config(file), arguments)
    text = script(how, job)
    if arguments.out is not None:
        check_output("--out", arguments.out)
        write_whole(Path(arguments.out), text)
        if how != "kubernetes":
            Path(arguments.out).chmod(0o755)
        print(f"written to {arguments.out}")
    elif not arguments.submit:
        print(text, end="")
    for line in chosen(how, job):
        print(f"# {line}")
    return submitted(how, text) if arguments.submit else 0


def check(arguments: LaunchArguments) -> None:
    for flag, value, least in (
        ("--nodes", arguments.nodes, 1),
        ("--gpus", arguments.gpus, 0),
        ("--ranks", arguments.ranks or 1, 1),
        ("--cpus", arguments.cpus or 1, 1),
        ("--max-restarts", arguments.max_restarts, 0),
        ("--save-every", arguments.save_every, 1),
    ):
        if value < least:
            raise UserError(f"{flag} is {value}, but it must be {least} or more")
    if arguments.gpus and arguments.ranks not in (None, arguments.gpus):
        raise UserError(f"--ranks {arguments.ranks} and --gpus {arguments.gpus} disagree; a rank has one GPU")


SUBMIT = {"slurm": ["sbatch"], "kubernetes": ["kubectl", "apply", "-f", "-"]}


def submitted(how: str, text: str) -> int:
    command = SUBMIT.get(how, ["bash", "-s"])
    if shutil.which(command[0]) is None:
        raise UserError(f"--submit needs {command[0]}, which is not installed here; write the script with --out")
    return subprocess.run(command, input=text, text=True, check=False).returncode
