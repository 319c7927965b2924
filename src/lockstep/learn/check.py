"""A check: the ranks of a lesson are started, its grader runs on them, and what went wrong is explained."""

import re
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from lockstep.errors import RankError, UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.launch.rank import blames_another, has_missed_its_peers
from lockstep.layout.world import World
from lockstep.learn.drawing import Logs, draw, events_of, last_calls, read_logs
from lockstep.learn.lesson import Lesson, lesson_named
from lockstep.learn.rank import Graded, Guess, NotPassedError, Rank, in_exercise
from lockstep.learn.recorder import Recorder
from lockstep.words import counted


@dataclass
class Outcome:
    """Of one check."""

    passed: bool
    seconds: float = 0.0
    problem: str = ""
    """What is wrong; its first line says it all."""
    ranks: int = 0
    """How many there were when it failed."""
    drawing: str = ""
    """The messages between them."""
    guesses: list[Guess] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(lesson: Lesson, file: Path, share_gpu: bool = False, patience: float = 1.0) -> Outcome:
    """Grade one file, on each number of ranks that the lesson names, until one fails.

    `patience`: how many times longer than the lesson says ranks may take, on a machine that is busy with other things.
    """
    start = time.monotonic()
    outcome = Outcome(True)
    for size in lesson.manifest.ranks:
        outcome = on_ranks(lesson, file.resolve(), size, share_gpu, patience * lesson.manifest.seconds)
        if not outcome.passed:
            break
    outcome.seconds = time.monotonic() - start
    return outcome


def on_ranks(lesson: Lesson, file: Path, size: int, share_gpu: bool, seconds: float) -> Outcome:
    device, backend = ("cuda", None) if share_gpu else ("cpu", "gloo" if size > 1 else None)
    launch = Launch(size, device, backend, share_gpu and size > 1, seconds, oversubscribe=True)  # type: ignore[arg-type]
    graded, failed = Graded(), None
    with tempfile.TemporaryDirectory(prefix="lockstep-learn-") as folder:
        try:
            graded = run_on_ranks(
                *(grade_on_rank, lesson.name, file, Path(folder), seconds),
                launch=launch,
                threads=1,
                start_method="forkserver",
            )[0]
        except (UserError, RankError) as error:
            failed = error
        logs = read_logs(Path(folder), size)
    if failed is not None:
        known = lesson.explain(logs) if isinstance(failed, RankError) else None
        graded.problem = "\n".join([*([known] if known else []), _in_words(failed, file, logs, seconds)])
    if not graded.problem:
        return Outcome(True, ranks=size, guesses=graded.guesses, notes=graded.notes)
    apart = next((e for e in events_of(logs) if e.came and not e.whole), None) if size > 1 else None
    if apart is not None:
        graded.problem += f"\nthe first collective that differs: {apart.text}"
    return Outcome(False, problem=graded.problem, ranks=size, drawing=draw(logs))


def _in_words(error: UserError | RankError, file: Path, logs: Logs, seconds: float) -> str:
    """Without what is said for operators: of a traceback, and of the stacks of ranks that hang, only the exercise."""
    text = str(error)
    if not isinstance(error, RankError):
        return text
    lines = text.splitlines()
    if text.startswith("the ranks hung: "):
        said = lines[0].removeprefix("the ranks hung: ")
        known = "" if said.startswith("no rank waits") else f": {said}"  # of messages the watch knows nothing
        return "\n".join([f"the ranks hung; cut after {seconds:g} s{known}", *last_calls(logs)])
    places = re.findall(rf'File "{re.escape(str(file))}", line (\d+), in (\w+)', text)
    if not places:
        return text
    line, function = places[-1]
    rank = re.match(r"rank \d+", lines[0])
    who = rank[0] if rank else "a rank"
    if "imed out" in lines[0]:
        first = f"the ranks hung; cut after {seconds:g} s: {who} waits at {file.name} line {line}, in {function}"
        return "\n".join([first, *last_calls(logs)])
    return f"{lines[0]}\nat {file.name} line {line}, in {function}"


def grade_on_rank(world: World, name: str, file: Path, folder: Path, seconds: float) -> Graded:
    """What each rank runs."""
    warnings.simplefilter("ignore", FutureWarning)  # names that one release calls old and another does not know yet
    lesson = lesson_named(name)
    recorder = Recorder(file, folder / f"rank{world.rank}.jsonl", world.rank)
    try:
        with cut_short(file, seconds):
            rank = Rank(world, lesson, file, recorder)
            rank.has_predicted()
            lesson.grade(rank)
            return rank.graded
    except NotPassedError as problem:
        return Graded(str(problem))
    except UserError:
        raise
    except Exception as error:
        if has_missed_its_peers(error) or blames_another(error):
            raise
        said = in_exercise(error, file)
        if said is None:
            raise
        where = f"on rank {world.rank}: " if world.size > 1 else ""
        raise UserError(where + said) from error


IDLE = 6
"""How many times longer it may take by the clock than it may compute: waiting has a limit of its own."""


@contextmanager
def cut_short(file: Path, seconds: float) -> Iterator[None]:
    """An exercise that computes for longer than this is left, wherever it is."""

    def leave(_: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != str(file):
            frame = frame.f_back
        at = f"{file.name} line {frame.f_lineno}" if frame is not None else "the exercise"
        raise UserError(f"it did not end within {seconds:g} s: it is at {at}")

    signals = {signal.SIGVTALRM: (signal.ITIMER_VIRTUAL, seconds), signal.SIGALRM: (signal.ITIMER_REAL, IDLE * seconds)}
    before = {number: signal.signal(number, leave) for number in signals}
    for timer, limit in signals.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, (timer, _) in signals.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def shown(outcome: Outcome) -> list[str]:
    """As lines for a terminal."""
    lines: list[str] = []
    if not outcome.passed:
        headline, *rest = outcome.problem.splitlines()
        lines = [f"✗ {headline}", *(f"  {line}" for line in rest)]
        if outcome.drawing:
            messages = f"  what {counted(outcome.ranks, 'rank')} sent each other, up to there:"
            lines += ["", messages, "", *(f"    {line}" for line in outcome.drawing.splitlines())]
        return lines
    for guess in outcome.guesses:
        right = abs(guess.predicted - guess.measured) <= 0.02 * max(abs(guess.measured), 1e-12)
        sign = "✓" if right else "≠"
        unit = f" {guess.unit}" if guess.unit else ""
        asks = re.sub(r"\s+", " ", guess.asks).strip()
        lines += [
            f"{sign} {asks}",
            f"    you predicted {guess.predicted:,.6g}{unit}; measured {guess.measured:,.6g}{unit}",
        ]
    return [*lines, *outcome.notes]
