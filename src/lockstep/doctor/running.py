"""What the ranks of a run are doing now."""

from pathlib import Path

import torch.distributed as dist

from lockstep.errors import UserError
from lockstep.launch.situation import state_of
from lockstep.launch.watch import ask_from_outside
from lockstep.training.attempt import note_if_gone, read_status, step_in_progress


def look_at(run: Path) -> tuple[str, bool]:
    """In words, and whether it has failed, or hangs. The run goes on."""
    note_if_gone(run)
    status = read_status(run)
    if status is None:
        raise UserError(f"{run} has no status.json of a run; give the folder of a run (lockstep train --run-dir)")
    head = f"{run}: {status.state}, step {step_in_progress(run):,}, {status.restarts} restarts"
    gone = "; ".join(f"rank {rank}: {state_of(*process)}" for rank, process in enumerate(status.ranks))
    if status.state == "failed":
        return f"{head}\n  {gone}", True
    if status.state != "running":
        return head, False
    if not status.store:
        return f"{head}\n  rank 0: {state_of(*status.ranks[0])}", False
    try:
        said = ask_from_outside(status.store, len(status.ranks))
    except (dist.DistError, RuntimeError, ValueError):
        return f"{head}\n  no answer at {status.store}: {gone}", True
    return f"{head}\n{said}", "did not" in said.splitlines()[0]
