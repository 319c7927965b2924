"""A check: the ranks of a lesson are started, its grader runs on them, and what went wrong is explained."""

import re
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lockstep.errors import RankError, UserError
from lockstep.launch import Launch, run_on_ranks
from lockstep.launch.leftovers import FOLDER_PREFIX
from lockstep.launch.processes import signature
from lockstep.launch.rank import blames_another, has_missed_its_peers
from lockstep.layout.world import World
from lockstep.learn.confined import IDLE, CutShort, cut_short, not_leaving, quiet_below, said_below
from lockstep.learn.drawing import draw, events_of, in_the_grader, last_calls, read_logs
from lockstep.learn.lesson import Lesson, lesson_named
from lockstep.learn.overseer import Overseer, bring_back, overseen
from lockstep.learn.rank import Graded, Guess, NotPassedError, Rank, in_exercise, in_grader
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


def check(lesson: Lesson, file: Path, share_gpu: bool = False, slowdown: float = 1.0) -> Outcome:
    """Grade one file, on each number of ranks that the lesson names, until one fails.

    `slowdown`: how many times longer than the lesson says ranks may take, on a machine that is busy with other things.
    """
    if share_gpu and not torch.cuda.is_available():
        raise UserError("--share-gpu: there is no GPU here; leave it out, and the ranks are CPU processes")
    start = time.monotonic()
    outcome = Outcome(True)
    for size in lesson.manifest.ranks:
        outcome = on_ranks(lesson, file.resolve(), size, share_gpu, slowdown * lesson.manifest.seconds)
        if not outcome.passed:
            break
    outcome.seconds = time.monotonic() - start
    return outcome


def on_ranks(lesson: Lesson, file: Path, size: int, share_gpu: bool, seconds: float) -> Outcome:
    device, backend = ("cuda", None) if share_gpu else ("cpu", "gloo" if size > 1 else None)
    launch = Launch(size, device, backend, share_gpu and size > 1, seconds, oversubscribe=True)  # type: ignore[arg-type]
    failed: UserError | RankError | None = None
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{signature()}-") as name:
        folder = Path(name)
        overseer = Overseer(folder, size, IDLE * seconds)
        overseer.start()
        try:
            run_on_ranks(
                *(grade_on_rank, lesson.name, file, folder, seconds),
                launch=launch,
                threads=1,
                start_method="forkserver",
                apart=True,
            )
        except (UserError, RankError) as error:
            failed = error
        finally:
            overseer.stop()
        graded = overseer.graded()
        if graded is not None and not graded[0].problem:  # all ranks were done, whatever ended them
            return Outcome(True, ranks=size, guesses=graded[0].guesses, notes=graded[0].notes)
        logs = read_logs(folder, size)
        if graded is not None:
            problem = graded[0].problem
        elif overseer.cut:
            problem = "\n".join([f"it did not end within {IDLE * seconds:g} s", *overseer.places(file)])
        else:
            assert failed is not None, "a rank has neither failed nor brought anything back"
            calls = last_calls(logs, in_the_grader(folder, size))
            problem = _in_words(failed, file, calls, seconds, said_below(folder))
            known = lesson.explain(logs) if isinstance(failed, RankError) else None
            problem = f"{known}\n{problem}" if known else problem
    apart = next((e for e in events_of(logs) if e.came and not e.whole), None) if size > 1 else None
    if apart is not None:
        problem += f"\nthe first collective that differs: {apart.text}"
    return Outcome(False, problem=problem, ranks=size, drawing=draw(logs))


def _in_words(error: UserError | RankError, file: Path, calls: list[str], seconds: float, below: str) -> str:
    """Without what is said for operators: of a traceback, and of the stacks of ranks that hang, only the exercise.

    `calls`: the last one of each rank. `below`: what gloo and NCCL have said.
    """
    text = str(error)
    if not isinstance(error, RankError):
        return text
    lines = text.splitlines()
    rank = re.match(r"rank \d+", lines[0])
    who = rank[0] if rank else "a rank"
    hung = f"the ranks hung; cut after {seconds:g} s"
    if text.startswith("the ranks hung: "):
        return "\n".join([hung, *calls])
    places = re.findall(rf'File "{re.escape(str(file))}", line (\d+), in (\w+)', text)
    if places:
        line, function = places[-1]
        if "imed out" in lines[0]:
            return "\n".join([f"{hung}: {who} waits at {file.name} line {line}, in {function}", *calls])
        return f"{lines[0]}\nat {file.name} line {line}, in {function}"
    sizes = re.search(r"(\d+) vs (\d+)", below)
    if sizes is not None:
        said = f"a message of {sizes[1]} B came where a rank expects {sizes[2]} B"
        return "\n".join([f"{said}: other shapes, dtypes or another order of calls", *calls])
    if "exit code" in lines[0]:
        return "\n".join([f"{who} has ended in the midst of it", *calls])
    return text


def grade_on_rank(world: World, name: str, file: Path, folder: Path, seconds: float) -> None:
    """What each rank runs."""
    warnings.simplefilter("ignore")  # of ours, and names that one release calls old and another does not know yet
    warnings.filterwarnings("error", message=".*autograd kernel was not registered")  # gradients would be wrong
    lesson = lesson_named(name)
    with overseen(folder, world.rank, IDLE * seconds), quiet_below(folder, world.rank):
        graded = _graded(world, lesson, file, folder, seconds)
        bring_back(folder, world.rank, graded)


def _graded(world: World, lesson: Lesson, file: Path, folder: Path, seconds: float) -> Graded:
    where = f"on rank {world.rank}: " if world.size > 1 else ""
    recorder = Recorder(file, folder / f"rank{world.rank}.jsonl", world.rank)
    try:
        with cut_short(file, seconds), not_leaving(file, where):
            rank = Rank(world, lesson, file, recorder)
            rank.has_predicted()
            lesson.grade(rank)
            return rank.graded
    except NotPassedError as problem:
        return Graded(str(problem))
    except CutShort as late:
        raise UserError(f"{where}{late}") from None
    except UserError:
        raise
    except BaseException as error:  # an exercise may raise anything
        if has_missed_its_peers(error) or blames_another(error):
            raise
        said = in_exercise(error, file) or in_grader(error, file)
        if said is None:
            raise
        raise UserError(where + said) from error


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
        whole = float(guess.measured).is_integer()  # what can be counted can be said exactly
        right = abs(guess.predicted - guess.measured) <= (0.0 if whole else 0.01) * abs(guess.measured)
        sign = "✓" if right else "≠"
        unit = f" {guess.unit}" if guess.unit else ""
        asks = re.sub(r"\s+", " ", guess.asks).strip()
        lines += [
            f"{sign} {asks}",
            f"    you predicted {guess.predicted:,.6g}{unit}; {guess.by} {guess.measured:,.6g}{unit}"
            + (f" = {guess.because}" if not right else ""),
        ]
    return [*lines, *outcome.notes]
