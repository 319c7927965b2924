"""Diagnoses against what was done to each run."""

from pathlib import Path

from lockstep.learn.lessons.things_break.sabotage import TRUTH
from lockstep.learn.rank import Rank

EVIDENCE = {
    "a": "a rank did not come at all to the last call, and its process is alive: it had less to do than the others",
    "b": "a process has ended, and not by itself",
    "c": "all ranks reached the same call number, with two different calls",
    "d": "two columns of norms, with the same factor in every step: rounding differs from step to step",
    "e": "one file is named, because its checksum differs",
}


def facts() -> list[str]:
    """Numbers of the text."""
    return ["1. **Is", "2. **Did", "3. **Did", "4. **Does", "5. **Does"]


def grade(rank: Rank) -> None:
    answers = rank.exercise.ANSWERS
    rank.expect(isinstance(answers, dict), "ANSWERS must be a dictionary: a letter -> (cause, what it is about)")
    causes = [cause for cause, _ in TRUTH.values()]
    for letter, (cause, about) in TRUTH.items():
        given = answers.get(letter)
        empty = f"not written yet: ANSWERS[{letter!r}]; look at the run first: python exercise.py {letter}"
        rank.expect(given is not None, empty)
        pair = isinstance(given, tuple | list) and len(given) == 2
        rank.expect(pair, f"ANSWERS[{letter!r}] must be a pair, (cause, what it is about), and is {given!r}")
        said, what = given
        known = f"{said!r} is none of the five causes: {', '.join(causes)}"
        rank.expect(said in causes, f"{letter}: {known}")
        what = Path(what).name if isinstance(what, str) else what
        what = int(what) if isinstance(what, str) and what.isdecimal() else what
        look = f"run it again (python exercise.py {letter}): {EVIDENCE[letter]}"
        rank.expect(said == cause, f"{letter}: it is not {said}. {look[0].upper()}{look[1:]}")
        if letter in ("a", "b", "c"):
            blame = "the rank that is named is the one that is waited for, or gone; the others only say what they saw"
            rank.expect(what == about, f"{letter}: {said} it is, but not rank {what}: {blame}")
        rank.expect(what == about, f"{letter}: {said} it is, but not {what}. {look[0].upper()}{look[1:]}")
    rank.note("d: 4 micro-batches, none of whose losses was divided by 4 before its backward")
    rank.note("that was the last lesson: docs/troubleshooting.md has more symptoms, lockstep chaos more faults")
