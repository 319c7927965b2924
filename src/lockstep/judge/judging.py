"""A judgement from end to end: the reference, the reference again, the candidate, and the verdict."""

import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lockstep.judge.assemble import Side, disagreeing
from lockstep.judge.changes import Settings
from lockstep.judge.compare import Judgement
from lockstep.judge.runs import Run, run
from lockstep.judge.store import Process
from lockstep.judge.verdict import Verdict, cannot


@dataclass
class Asked:
    """What is to be judged, and how strictly."""

    reference: str
    candidate: str
    steps: int = 6
    same_start: bool = True
    no_dropout: bool = False
    strict: bool = False
    timeout: float = 300.0
    share_gpu: bool = False


Say = Callable[[str], None]
Keep = Callable[[Verdict, Judgement], None]


def judge(asked: Asked, say: Say = lambda _: None, keep: Keep = lambda *_: None) -> Verdict:
    """`say`: called with the current phase. `keep`: given the comparison while its tensors are there."""
    with reference_of(asked, say) as reference:
        return against(reference, asked, say, keep)


@dataclass
class Reference:
    """Run twice. Any number of candidates can be held against it."""

    folder: Path
    run: Run
    again: Run | None = None
    """Its rows in another order; None where that did not run."""
    candidates: int = 0


@contextmanager
def reference_of(asked: Asked, say: Say = lambda _: None) -> Iterator[Reference]:
    folder = Path(tempfile.mkdtemp(prefix="lockstep-judge-"))
    try:
        say("reference")
        settings = Settings(asked.steps, no_dropout=asked.no_dropout)
        found = Reference(folder, run(asked.reference, folder / "reference", settings, asked.timeout))
        if found.run.problem is None:
            found.again = run_again(found.run, asked, say)
        yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_again(reference: Run, asked: Asked, say: Say) -> Run | None:
    """The reference, its rows in another order; where these are no samples, and so have an order, only its weights
    moved by their last bit.
    """
    settings = Settings(asked.steps, start="reference", moved=True, no_dropout=asked.no_dropout)
    for reordered in (True, False):
        settings.reordered = reordered
        say(f"reference again, {'its batch in another order' if reordered else 'its last bits moved'}")
        folder = reference.folder.with_name(f"again-{reordered}")
        again = run(asked.reference, folder, settings, asked.timeout)
        if again.problem is None and (not reordered or is_itself(reference, again)):
            return again
    return None


def is_itself(reference: Run, again: Run) -> bool:
    judgement = Judgement(Side(reference), Side(again), Side(reference))
    return all(judgement.rounding.unstable(place) is None for place in judgement.reference.events)


def against(reference: Reference, asked: Asked, say: Say = lambda _: None, keep: Keep = lambda *_: None) -> Verdict:
    if reference.run.problem is not None:
        return cannot(f"reference: {reference.run.problem}")
    notes = []
    if reference.again is None:
        notes.append("the reference did not run with its batch in another order: fixed tolerances are used")
    say("candidate")
    candidate, filled = run_candidate(reference, asked, say)
    if candidate.problem is not None and candidate.steps == 0:
        return cannot(f"candidate: {candidate.problem}")
    if filled:
        notes.append("the candidate began with other weights, and was given the reference's (--no-same-start)")
    again = Side(reference.again) if reference.again is not None else None
    try:
        judgement = Judgement(Side(reference.run), again, Side(candidate), asked.strict, notes)
        found = judgement.verdict()
    except Exception as error:  # a failure of ours must not look like one of the script's
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return cannot(f"the comparison itself failed ({where}): {type(error).__name__}: {error}", *notes)
    if candidate.problem is not None and found.verdict != "differs":
        found = cannot(f"after {candidate.steps} steps that are equal, candidate: {candidate.problem}", *notes)
    keep(found, judgement)
    return found


def run_candidate(reference: Reference, asked: Asked, say: Say) -> tuple[Run, bool]:
    """Once more with the reference's weights, where its ranks agree among each other and only the seed differs."""
    other: list[bool] = []
    reference.candidates += 1
    folder = reference.folder / f"candidate-{reference.candidates}"
    settings = Settings(asked.steps, no_dropout=asked.no_dropout, share_gpu=asked.share_gpu)

    def look(found: list[Process]) -> bool:
        if not other and found and len(found) == found[0].size and all(any(p.of("step")) for p in found):
            other.append(asked.same_start and only_seed_differs(reference.run, Run("", folder, found)))
        return not (other and other[0])

    candidate = run(asked.candidate, folder, settings, asked.timeout, look)
    if not other:
        look(candidate.processes)
    if not other or not other[0]:
        return candidate, False
    say("candidate again, with the reference's weights")
    settings.start = "reference"
    return run(asked.candidate, folder.with_name(f"{folder.name}-filled"), settings, asked.timeout), True


def only_seed_differs(reference: Run, candidate: Run) -> bool:
    judgement = Judgement(Side(reference), None, Side(candidate))
    verdict = judgement.start()
    if verdict is None or verdict.what != "initial weights":
        return False
    mine, theirs = judgement.candidate.start(), judgement.reference.start()
    return not disagreeing(mine) and all(drawn_alike(mine.whole(n), theirs.whole(n)) for n in verdict.names)


FEW = 4
"""So few numbers have no spread to speak of: drawn ones are at least not zero."""


def drawn_alike(got: Tensor, expected: Tensor) -> bool:
    """As far as their mean and spread say, of the same distribution."""
    if got.numel() != expected.numel():
        return False
    size, spread = expected.numel(), float(expected.std(correction=0))
    if size < FEW:
        return bool(got.all()) and bool(expected.all())
    near = 5 / size**0.5
    return abs(float(got.std(correction=0)) - spread) <= near * spread and (
        abs(float(got.mean() - expected.mean())) <= 1.5 * near * spread
    )
