"""`lockstep launch`."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lockstep.cli.parsing import check_output, parse
from lockstep.config import load_config
from lockstep.config.cluster import HOWS, Job, chosen, script
from lockstep.errors import UserError
from lockstep.results.whole import write_whole


@dataclass
class LaunchArguments:
    """Write the script that starts a config on a cluster, and say what was chosen: lockstep launch
    slurm|torchrun|kubernetes|deepspeed CONFIG.

    For example:

    lockstep launch slurm configs/gpt_3d.yaml --nodes 4 --gpus 8 --time 12:00:00 --out job.sh

    lockstep launch slurm configs/digits_cnn.yaml --nodes 2 --ranks 2 --submit

    lockstep launch torchrun configs/fsdp_transformer.yaml --nodes 2 --gpus 8 --master node1

    lockstep launch kubernetes configs/fsdp_transformer.yaml --nodes 2 --gpus 8 --image registry/lockstep:1
    """

    nodes: int = 1
    gpus: int = 0
    """Of each node, one rank for each. 0: the ranks compute on CPUs."""
    ranks: int | None = None
    """Of each node. None: one for each GPU; one on CPUs."""
    cpus: int | None = None
    """Cores of each rank. None: what the cluster gives."""
    time: str = "24:00:00"
    """Slurm: the time limit. Two minutes before it the run saves, and is queued again."""
    partition: str | None = None
    """Slurm's."""
    name: str = "lockstep"
    """Of the job."""
    master: str | None = None
    """torchrun and deepspeed: the first node's address."""
    port: int = 29500
    """torchrun and kubernetes: where the nodes meet."""
    max_restarts: int = 3
    """torchrun and kubernetes: how often all ranks are started anew when one fails."""
    save_every: int = 100
    """Steps between checkpoints, where the config has none: without them nothing could be gone on with."""
    image: str = "lockstep:latest"
    """kubernetes: a container image that has lockstep and the config in it."""
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
    config = load_config(file)
    ranks = arguments.ranks or max(1, arguments.gpus)
    job = Job(
        file,
        config,
        arguments.nodes,
        arguments.gpus,
        ranks,
        cpus=arguments.cpus,
        time=arguments.time,
        partition=arguments.partition,
        name=arguments.name,
        master=arguments.master,
        port=arguments.port,
        max_restarts=arguments.max_restarts,
        save_every=arguments.save_every,
        image=arguments.image,
    )
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
