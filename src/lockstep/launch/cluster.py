"""The scripts that start a config on a cluster: for Slurm, torchrun, Kubernetes and DeepSpeed's launcher."""

import shlex
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from math import prod

import yaml

from lockstep.config.schema import Config
from lockstep.errors import UserError

JOINABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set, torchrun's agents publish the rendezvous address in each round, not in the first alone."""
WARNING_SECONDS = 120
"""Before the time limit, in which a run saves."""


@dataclass
class Place:
    """Where a job is to run, and how it is to be kept alive there."""

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
    """torchrun and kubernetes: the address of the rendezvous."""
    max_restarts: int = 3
    """torchrun and kubernetes: how often all ranks are started anew when one fails."""
    save_every: int = 100
    """Steps between checkpoints, where the config has none: without them nothing could be gone on with."""
    image: str = "lockstep:latest"
    """kubernetes: a container image that has lockstep and the config in it."""


@dataclass(frozen=True)
class Job:
    """What is to be started where."""

    file: str
    config: Config
    place: Place

    @property
    def ranks(self) -> int:
        """Of each node."""
        return self.place.ranks or max(1, self.place.gpus)

    @property
    def world(self) -> int:
        return self.place.nodes * self.ranks

    @property
    def run_dir(self) -> str:
        """The same at each start, so that a later one finds what an earlier one has saved."""
        return f"runs/{self.place.name}"

    def flags(self) -> list[str]:
        """Of `lockstep train`, beyond the config."""
        saving = self.config.checkpoint
        saves = saving.every or saving.every_seconds
        every = [] if saves else ["--checkpoint.every", str(self.place.save_every)]
        return ["--run-dir", self.run_dir, "--resume", "auto", *every]

    def train(self) -> str:
        return shlex.join(["train", self.file, *self.flags()])


def check_fits(job: Job) -> None:
    """Degrees that the ranks cannot have are refused here, and not on the cluster."""
    parallel = job.config.parallel
    cut = {axis: degree for axis in ("pp", "cp", "tp") if (degree := getattr(parallel, axis)) > 1}
    if job.world % prod(cut.values()):
        degrees = ", ".join(f"{axis} {degree}" for axis, degree in cut.items())
        raise UserError(
            f"{job.file} has {degrees}, which {job.place.nodes} x {job.ranks} ranks cannot be divided by; give another "
            f"number of --nodes, --gpus or --ranks"
        )


def chosen(how: str, job: Job) -> list[str]:
    """What was chosen, for the person who starts it."""
    found = [f"{job.place.nodes} x {job.ranks} ranks, {'a GPU each' if job.place.gpus else 'on CPUs'}, of {job.file}"]
    saving = job.config.checkpoint
    if not (saving.every or saving.every_seconds):
        found.append(
            f"the config saves nothing: a checkpoint every {job.place.save_every} steps was added (--save-every)"
        )
    if job.config.parallel.tp > job.ranks:
        found.append(f"tensor parallelism of {job.config.parallel.tp} spans nodes of {job.ranks} ranks, which is slow")
    if how == "slurm":
        found.append(
            f"{WARNING_SECONDS} s before {job.place.time} is over it saves, and is queued again until it is done"
        )
    return found


# ---- each kind -------------------------------------------------------------------------------------------------


def slurm(job: Job) -> str:
    options = {
        "job-name": job.place.name,
        "nodes": job.place.nodes,
        "ntasks-per-node": job.ranks,
        "gpus-per-node": job.place.gpus or None,
        "cpus-per-task": job.place.cpus,
        "partition": job.place.partition,
        "time": job.place.time,
        "output": f"{job.place.name}-%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *lines,
            "#SBATCH --requeue",
            f"#SBATCH --signal=USR1@{WARNING_SECONDS}",
            "set -uo pipefail",
            "",
            "# One task is one rank; the rendezvous follows from Slurm's variables.",
            f"srun --kill-on-bad-exit=1 lockstep {job.train()}",
            "status=$?",
            "# 138: the ranks had USR1, two minutes before the time limit, and have saved; 143: TERM. Queue it again.",
            "if ((status == 138 || status == 143)); then",
            '    scontrol requeue "$SLURM_JOB_ID"',
            "    exit 0",
            "fi",
            "exit $status",
            "",
        ]
    )


def torchrun(job: Job) -> str:
    place = job.place
    master = place.master or ("127.0.0.1" if place.nodes == 1 else None)
    if master is None:
        raise UserError("lockstep launch torchrun with --nodes needs --master, the address of the first one")
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Run this on each of the {job.place.nodes} nodes, in any order."
            if job.place.nodes > 1
            else "# Run this on the machine.",
            "set -euo pipefail",
            *("# Else a node that joins later would never learn the rendezvous address.", f"export {JOINABLE}=1"),
            f"exec torchrun --nnodes={place.nodes} --nproc-per-node={job.ranks} --max-restarts={place.max_restarts} \\",
            f"    --rdzv-backend=c10d --rdzv-endpoint={master}:{place.port} --rdzv-id={shlex.quote(place.name)} \\",
            f"    -m lockstep {job.train()}",
            "",
        ]
    )


def deepspeed(job: Job) -> str:
    """Its launcher reaches the nodes by ssh, from a file that lists them."""
    hosts = [job.place.master or "node1", *(f"node{number}" for number in range(2, job.place.nodes + 1))]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# DeepSpeed's launcher starts the ranks of all nodes by ssh: put their names into the hostfile below.",
            "set -euo pipefail",
            "hostfile=$(mktemp)",
            "trap 'rm -f \"$hostfile\"' EXIT",
            'cat >"$hostfile" <<END',
            *(f"{host} slots={job.ranks}" for host in hosts),
            "END",
            f'deepspeed --hostfile "$hostfile" --module lockstep {job.train()} --parallel.data deepspeed',
            "",
        ]
    )


def kubernetes(job: Job) -> str:
    """A PyTorchJob of Kubeflow's: a status of 128 and more is tried again, which is what a pod that is moved leaves."""
    run = (
        f"{JOINABLE}=1 torchrun --nnodes={job.place.nodes} --nproc-per-node={job.ranks} "
        f"--max-restarts={job.place.max_restarts} "
        f"--rdzv-backend=c10d --rdzv-endpoint=${{MASTER_ADDR}}:{job.place.port} --rdzv-id={job.place.name} "
        f"-m lockstep {job.train()}"
    )
    container: dict[str, object] = {
        "name": "pytorch",
        "image": job.place.image,
        "command": ["sh", "-c", run],
        "ports": [{"name": "pytorchjob-port", "containerPort": job.place.port}],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "runs", "mountPath": "/workspace/runs"}],
        "workingDir": "/workspace",
    }
    if job.place.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.place.gpus}}
    pod = {
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # a container's own is 64 MiB
            {"name": "runs", "persistentVolumeClaim": {"claimName": f"{job.place.name}-runs"}},
        ],
    }

    def replicas(count: int) -> dict[str, object]:
        return {"replicas": count, "restartPolicy": "ExitCode", "template": {"spec": deepcopy(pod)}}

    kinds = {"Master": replicas(1), **({"Worker": replicas(job.place.nodes - 1)} if job.place.nodes > 1 else {})}
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.place.name},
        "spec": {"nprocPerNode": str(job.ranks), "pytorchReplicaSpecs": kinds},
    }
    return yaml.safe_dump(manifest, sort_keys=False, width=10_000)


HOWS: dict[str, Callable[[Job], str]] = {
    "slurm": slurm,
    "torchrun": torchrun,
    "kubernetes": kubernetes,
    "deepspeed": deepspeed,
}


def script(how: str, job: Job) -> str:
    check_fits(job)
    return HOWS[how](job)
