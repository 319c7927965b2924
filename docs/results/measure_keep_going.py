"""What lost ranks cost a run with --keep-going: steps in a given time with ranks killed every so often, over those of
an undisturbed run of the same time, in turns; and how long the others stood still.

python docs/results/measure_keep_going.py [--seconds 60] [--turns 2] [--nproc 3] [--every 8 15]
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from lockstep.training.attempt import read_status, step_in_progress

CONFIG = [
    *(
        "--model.name",
        "gpt",
        "--model.d-model",
        "128",
        "--model.layers",
        "4",
        "--data.name",
        "text",
        "--train.batch-size",
        "12",
    ),
    *("--train.optimizer", "adamw", "--train.lr", "1e-3", "--train.steps", "1000000", "--train.evaluate-every", "0"),
    "--metrics.no-tensorboard",
]


def steps_in(
    seconds: float, nproc: int, every: tuple[float, float] | None, draws: random.Random
) -> tuple[int, list[float], int]:
    """(steps, pauses, kills) of the time after the first step; `every`: seconds between kills, at least and at most."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "lockstep", "train", *CONFIG, "--nproc", str(nproc), "--keep-going"]
        with subprocess.Popen(
            [*command, "--run-dir", str(run)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as launcher:
            while step_in_progress(run) < 20:
                time.sleep(0.05)
            begin, kills = step_in_progress(run), 0
            end = time.monotonic() + seconds
            following = time.monotonic() + draws.uniform(*every) if every else end + 1
            while time.monotonic() < end:
                time.sleep(0.02)
                status = read_status(run)
                if time.monotonic() > following and status is not None:
                    os.kill(draws.choice(status.ranks)[1], signal.SIGKILL)
                    kills += 1
                    following = time.monotonic() + draws.uniform(*every or (0, 0))
            taken = step_in_progress(run) - begin
            lines = (run / "metrics.jsonl").read_text().splitlines()
            launcher.send_signal(signal.SIGINT)
            launcher.wait(60)
    pauses = [record["pause_s"] for record in map(json.loads, lines) if record["kind"] == "regroup"]
    return taken, pauses, kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--nproc", type=int, default=3)
    parser.add_argument("--every", type=float, nargs=2, default=(8.0, 15.0))
    args = parser.parse_args()
    draws = random.Random(0)
    print(f"{args.nproc} ranks, {args.seconds:g} s each, one killed every {args.every[0]:g} to {args.every[1]:g} s")
    print("turn  undisturbed  killed  steps kept  kills  pause, median  longest")
    for turn in range(args.turns):
        undisturbed, _, _ = steps_in(args.seconds, args.nproc, None, draws)
        taken, pauses, kills = steps_in(args.seconds, args.nproc, tuple(args.every), draws)
        print(
            f"{turn:>4}  {undisturbed:>11,}  {taken:>6,}  {taken / undisturbed:>10.1%}  {kills:>5}  "
            f"{median(pauses or [0.0]):>11.2f} s  {max(pauses, default=0.0):>5.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
