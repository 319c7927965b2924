"""Planted faults: each .patch here makes one thing silently wrong, and says which proof must catch it.

    fault: what is wrong
    kind: of which kind
    caught by: verify STRATEGY on RANKS [with OPTIMIZER], or pytest FILE

`python -m tests.mutants [NAME ...]` plants them one after the other in a copy of the sources, and prints a table;
`tests/test_mutants.py` takes a part of them in the slow tier. A proof that a mutant survives is no proof.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT = 400.0


@dataclass(frozen=True)
class Mutant:
    name: str
    fault: str
    kind: str
    caught_by: str
    patch: Path

    @classmethod
    def read(cls, patch: Path) -> "Mutant":
        header = patch.read_text(encoding="utf-8").partition("diff --git")[0]
        said = dict(line.split(": ", 1) for line in header.splitlines() if ": " in line)
        return cls(patch.stem, said["fault"], said["kind"], said["caught by"], patch)


def mutants() -> list[Mutant]:
    return [Mutant.read(patch) for patch in sorted(HERE.glob("*.patch"))]


def command_of(caught_by: str) -> list[str]:
    how, *rest = caught_by.split()
    if how == "pytest":
        return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", *rest]
    strategy, _, ranks, *optimizer = rest
    chosen = ["--train.optimizer", optimizer[1]] if optimizer else []
    return [sys.executable, "-m", "lockstep", "verify", "--strategies", strategy, "--world-size", ranks, *chosen]


def run(mutant: Mutant) -> tuple[bool, str]:
    """(whether it was caught, in which words)."""
    with tempfile.TemporaryDirectory(prefix="lockstep-mutant-") as folder:
        copy = Path(folder) / "checkout"
        skipped = shutil.ignore_patterns("__pycache__", "mutants")
        for part in ("src", "tests", "examples", "scripts", "pyproject.toml"):
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part, ignore=skipped, symlinks=True)
            else:
                shutil.copy2(source, copy / part)
        subprocess.run(["git", "apply", "--recount", str(mutant.patch)], cwd=copy, check=True, capture_output=True)
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # a worker's, say
        environment = {**ours, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
        try:
            done = subprocess.run(
                command_of(mutant.caught_by),
                **{"cwd": copy, "env": environment, "timeout": TIMEOUT, "capture_output": True, "text": True},
            )
        except subprocess.TimeoutExpired:
            return False, "it hangs, and no proof names it"
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        named = [line for line in said if line.startswith(("✗", "FAILED"))]
        return bool(named), (named or said or ["nothing was said"])[0 if named else -1][:300]
