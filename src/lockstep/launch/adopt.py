"""Ranks that another launcher has started: torchrun's are as torch wants them, srun's are translated."""

import os
import re
from collections.abc import Mapping


def adopt_environment() -> bool:
    """True if another launcher started this process as a rank. srun's variables are translated to torch's."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return True
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return False
    slurm = os.environ
    first_host = _first_host(slurm.get("SLURM_STEP_NODELIST", slurm.get("SLURM_JOB_NODELIST", "127.0.0.1")))
    os.environ.update(
        RANK=slurm["SLURM_PROCID"],
        WORLD_SIZE=slurm["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=slurm["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(_tasks_on_this_node(slurm)),
    )
    os.environ.setdefault("MASTER_ADDR", first_host)
    os.environ.setdefault("MASTER_PORT", str(port_of(slurm)))
    return True


def port_of(slurm: Mapping[str, str]) -> int:
    """All ranks must name the same free port without talking: it follows from the numbers of the job and its step, two
    of which may run at once.
    """
    job, step = int(slurm.get("SLURM_JOB_ID", "0")), int(slurm.get("SLURM_STEP_ID", "0"))
    return 20000 + (job * 64 + step) % 20000


def _tasks_on_this_node(slurm: Mapping[str, str]) -> int:
    """`4(x2),3`: four tasks on each of two nodes, then three."""
    per_node: list[int] = []
    for part in slurm.get("SLURM_STEP_TASKS_PER_NODE", slurm["SLURM_STEP_NUM_TASKS"]).split(","):
        tasks, _, nodes = part.rstrip(")").partition("(x")
        per_node += [int(tasks)] * int(nodes or 1)
    return per_node[min(int(slurm.get("SLURM_NODEID", "0")), len(per_node) - 1)]


def _first_host(nodelist: str) -> str:
    """`node[03-05,9],x1` -> `node03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodelist)
    assert match is not None, nodelist
    return match.group(1) + (match.group(2) or "")
