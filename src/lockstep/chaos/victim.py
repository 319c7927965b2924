"""The run that a fault is done to: `lockstep train` in a process of its own, with a fault in it.

python -m lockstep.chaos.victim CONFIG RUN_DIR FAULT STEP RANK NPROC BACKEND TIMEOUT MAX_RESTARTS [RESUME]
"""

import sys
from pathlib import Path

from lockstep.chaos.inside import train_with_fault
from lockstep.config import load_config
from lockstep.errors import RankError, UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.training.result import TrainResult


def main(argv: list[str]) -> int:
    config, run_dir, fault, step, rank, nproc, backend, timeout, restarts, *resume = argv
    launch = Launch(int(nproc), "cpu", None if backend == "auto" else backend, timeout=float(timeout))
    try:
        result: TrainResult = run_on_ranks(
            *(train_with_fault, load_config(config), run_dir, resume[0] if resume else None),
            *(fault, int(step), int(rank)),
            launch=launch,
            saves_when_stopped=True,
            max_restarts=int(restarts),
        )[0]
    except (RankError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(result.not_saved is not None or not Path(run_dir).exists())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
