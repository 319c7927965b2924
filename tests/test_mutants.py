"""The proofs are proven: planted faults are caught, and by name."""

import subprocess

import pytest

from tests.mutants import ROOT, Mutant, mutants, run

ALL = mutants()
SOME = ALL[::40]
"""What the slow tier has time for; `python -m tests.mutants` takes all of them."""


def test_every_mutant_says_what_it_is_and_applies() -> None:
    assert len(ALL) >= 120
    for mutant in ALL:
        assert mutant.caught_by.split()[0] in ("verify", "pytest"), mutant.name
        words = ["git", "apply", "--check", "--recount", str(mutant.patch)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{mutant.name} no longer fits the sources: {done.stderr}"


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("mutant", SOME, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_caught(mutant: Mutant) -> None:
    caught, said = run(mutant)
    assert caught, f"{mutant.fault} survived {mutant.caught_by}: {said}"
