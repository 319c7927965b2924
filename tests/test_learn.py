"""The course: skeletons fail with their own message, solutions pass, and known mistakes are called by their names."""

import re
import signal
import subprocess
import sys
import threading
from math import ceil, floor
from pathlib import Path
from typing import IO

import pytest

from lockstep.cli import main
from lockstep.errors import UserError
from lockstep.learn.check import Outcome, check
from lockstep.learn.course import Course
from lockstep.learn.drawing import draw
from lockstep.learn.lesson import MOST_LINES, Lesson, lesson_named, lessons
from lockstep.learn.master import parse, render, wrong_names
from tests.learn_trials import TRIALS, written
from tests.ranks import LONG

IN_ORDER = [pytest.param(lesson, id=lesson.slug) for lesson in lessons()]
WRONG = [pytest.param(lesson, name, id=f"{lesson.slug}-{name}") for lesson in lessons() for name in lesson.wrong_names]


PATIENT = 30.0
"""No check fails because the machine is busy; what is meant to hang is cut as it would be for a learner."""
HANG = {"from-itself", "own-groups-only", "same-neighbour", "blocking", "hooks-order", "blocking-sends"}


def outcome_of(lesson: Lesson, text: str, folder: Path, patience: float = PATIENT) -> Outcome:
    file = folder / "exercise.py"
    file.write_text(text)
    return check(lesson, file, patience=patience)


# ---- every lesson --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lesson", [*IN_ORDER[:9], *(pytest.param(o, id=o.slug, marks=pytest.mark.slow) for o in lessons()[9:])]
)
def test_a_solution_passes(lesson: Lesson, tmp_path: Path) -> None:
    outcome = outcome_of(lesson, lesson.solution, tmp_path)
    assert outcome.passed, outcome.problem + "\n" + outcome.drawing
    assert len(outcome.guesses) == len(lesson.manifest.predict)
    for guess in outcome.guesses:
        assert guess.predicted == pytest.approx(guess.measured), guess.asks
        assert eval(guess.because, {"ceil": ceil, "floor": floor}) == pytest.approx(guess.measured)


@pytest.mark.slow
@pytest.mark.parametrize("lesson", IN_ORDER)
def test_a_skeleton_says_what_to_write(lesson: Lesson, tmp_path: Path) -> None:
    outcome = outcome_of(lesson, lesson.skeleton, tmp_path)
    assert not outcome.passed
    assert "not written yet" in outcome.problem or "predict first" in outcome.problem, outcome.problem


@pytest.mark.slow
@pytest.mark.parametrize(("lesson", "name"), WRONG)
def test_a_known_mistake_has_a_name(lesson: Lesson, name: str, tmp_path: Path) -> None:
    outcome = outcome_of(lesson, lesson.wrong(name), tmp_path, 1.0 if name in HANG else PATIENT)
    assert not outcome.passed
    assert lesson.manifest.wrong[name] in outcome.problem, outcome.problem + "\n" + outcome.drawing


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trial"), [(lesson, trial) for lesson in TRIALS for trial in TRIALS[lesson]])
def test_what_learners_wrote(name: str, trial: str, tmp_path: Path) -> None:
    outcome = outcome_of(lesson_named(name), written(name, trial), tmp_path)
    said = TRIALS[name][trial][1]
    assert outcome.passed == (said is None), outcome.problem + "\n" + outcome.drawing
    assert (said or "") in outcome.problem, outcome.problem + "\n" + outcome.drawing


@pytest.mark.slow
def test_the_hang_that_the_docs_show(tmp_path: Path) -> None:
    lesson = lesson_named("all_reduce")
    outcome = outcome_of(lesson, lesson.wrong("blocking"), tmp_path, patience=1)
    page = (Path(__file__).parents[1] / "docs" / "learn.md").read_text()
    shown_there = {line.strip() for line in page.splitlines()}
    drawn = [line for line in outcome.drawing.splitlines() if "✗" in line]
    assert len(drawn) == 3
    for line in [*outcome.problem.splitlines()[2:], *drawn]:
        assert line.strip() in shown_there, f"{line}\n{outcome.problem}\n{outcome.drawing}"


@pytest.mark.parametrize("lesson", IN_ORDER)
def test_a_lesson_is_complete(lesson: Lesson) -> None:
    manifest = lesson.manifest
    assert set(lesson.wrong_names) == set(manifest.wrong)
    assert len(manifest.wrong) >= 3
    assert len(manifest.hints) == 3
    assert 20 <= manifest.minutes <= 60
    assert all(needed < lesson.number for needed in manifest.needs)
    assert len(lesson.skeleton.splitlines()) <= MOST_LINES
    assert lesson.text.startswith(f"# {lesson.number}. {manifest.title}\n")
    assert lesson.home.is_file(), manifest.home
    for asked in manifest.predict:
        assert asked.name in lesson.skeleton
        assert asked.name in lesson.text
    assert len({*lesson.wrong_names} & {"solution", "skeleton"}) == 0


@pytest.mark.parametrize("lesson", IN_ORDER)
def test_every_number_of_a_text_is_computed(lesson: Lesson) -> None:
    """Outside of code, a number stands in a text only if the lesson's own code comes to it."""
    prose = re.sub(r"```.*?```", "", lesson.text.partition("\n")[2], flags=re.S)
    text = re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "", prose))
    for fact in lesson.facts():
        assert fact in text, f"the text does not say {fact!r}"
        text = text.replace(fact, "")
    text = re.sub(r"\b(?i:rank|copy|lesson|stage|block|ZeRO|step) \d+", "", text)  # names, not numbers
    assert not re.findall(r"(?<!\w)\d[\d,.]*", text), "a number that nothing computes"


def test_lessons_are_numbered_in_order() -> None:
    assert [lesson.number for lesson in lessons()] == list(range(1, len(lessons()) + 1))


def test_the_first_nine_cover_what_others_teach() -> None:
    """Every page and file of a syllabus that many know."""
    pages = {"Baseline", "Motivation for DP", "Manual", "All-Reduce Algorithms", "Naive DP", "Gradient Hooks", "DDP",
             "Gradient Bucketing", "Synchronization Primitives", "Performance Analysis"}  # fmt: skip
    files = {"comms.py", "model.py", "schedule.py", "bucketing.py"}
    assert pages | files <= {name for lesson in lessons()[:9] for name in lesson.manifest.covers}


# ---- the master ----------------------------------------------------------------------------------------------------

MASTER = """\
def f(x):
    #: solution
    return x + 1
    #: todo add
    #: wrong twice
    # if x:
    #     return x + 2
    # return 2
    #: end
"""


def test_a_skeleton_may_be_other_code_than_a_todo() -> None:
    constant = "#: solution\nBYTES = 8\n#: skeleton\n# BYTES = None  # say it\n#: end\n"
    assert render(constant, "skeleton") == "BYTES = None  # say it\n"
    more = "def f():\n    #: solution\n    yield 1\n    #: todo one\n    # yield\n    #: end\n"
    assert render(more, "skeleton") == 'def f():\n    raise NotImplementedError("one")\n    yield\n'
    assert '("say \\"hi\\"")' in render('#: solution\n#: todo say "hi"\n#: end\n', "skeleton")


def test_one_master_makes_them_all() -> None:
    assert render(MASTER, "solution") == "def f(x):\n    return x + 1\n"
    assert render(MASTER, "skeleton") == 'def f(x):\n    raise NotImplementedError("add")\n'
    assert render(MASTER, "twice") == "def f(x):\n    if x:\n        return x + 2\n    return 2\n"
    assert wrong_names(MASTER) == ["twice"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#: solution\n#: end\n", "without a skeleton"),
        ("#: solution\n#: skeleton\n", "does not end"),
        ("#: skeleton\n", "outside a region"),
        ("#: solution\n#: skeleton\ncode\n#: end\n", "as a comment"),
        ("#: solution\n#: solution\n", "begins inside another"),
    ],
)
def test_a_master_that_is_marked_wrongly_says_where(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse(text)


# ---- the drawing ---------------------------------------------------------------------------------------------------


def call(op: str, at: float, peer: int | None = None, elements: int = 4, line: int = 7) -> dict[str, object]:
    return {"op": op, "at": at, "peer": peer, "elements": elements, "line": line}


def test_messages_are_drawn() -> None:
    logs = [
        [call("isend", 1.0, 1), call("irecv", 1.1, 1), call("all_reduce", 3.0, elements=12)],
        [call("isend", 1.2, 0), call("irecv", 1.3, 0), call("all_reduce", 3.1, elements=12), call("recv", 5.0, 0)],
    ]
    lines = draw(logs).splitlines()
    assert lines[0].split() == ["rank", "0", "rank", "1"]
    assert "▶" in lines[1]
    assert "isend of 4, line 7" in lines[1]
    assert "◀" in lines[2]
    assert "═" in lines[3]
    assert "all_reduce of 12" in lines[3]
    assert "recv of 4, line 7; rank 0 never sent it" in lines[4]


def test_a_collective_that_one_rank_does_not_come_to() -> None:
    drawn = draw([[call("all_reduce", 1.0)], [call("broadcast", 1.0, 0)], [call("all_reduce", 1.0)]])
    assert "✗ all_reduce of 4, line 7; not rank 1" in drawn
    assert "✗ broadcast of 4 at rank 0, line 7; not ranks 0, 2" in drawn


# ---- the course ----------------------------------------------------------------------------------------------------


def test_a_course_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["learn", "start", "mine"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    first = lessons()[0]
    file = tmp_path / "mine" / first.slug / "exercise.py"
    assert file.read_text() == first.skeleton
    assert main(["learn", "check"]) == 1
    assert "predict first" in capsys.readouterr().out
    assert main(["learn", "solution", "1"]) == 2  # before all hints
    for _ in first.manifest.hints:
        assert main(["learn", "hint"]) == 0
    assert "hint 3 of 3" in capsys.readouterr().out
    assert main(["learn", "solution", "1"]) == 0
    assert capsys.readouterr().out == first.solution
    file.write_text(first.solution)
    assert main(["learn", "check", "1"]) == 0
    assert "passed in" in capsys.readouterr().out
    assert main(["learn", "check", "1"]) == 0
    assert "unchanged since" in capsys.readouterr().out  # not run again
    file.write_text(first.solution + "# changed\n")
    assert main(["learn", "list"]) == 0
    assert "edited" in capsys.readouterr().out
    assert main(["learn", "diff", "1"]) == 0
    assert "# changed" in capsys.readouterr().out
    assert main(["learn", "reset", "1"]) == 0
    assert file.read_text() == first.skeleton
    assert (file.parent / "exercise.1.old").read_text().endswith("# changed\n")
    assert main(["learn", "next", "--dir", str(file.parent)]) == 0
    assert first.manifest.title in capsys.readouterr().out
    assert main(["learn", "start", "."]) == 0  # again: nothing is lost
    assert Course.at(tmp_path / "mine").hints == {}


def test_nothing_of_a_persons_own_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    thesis = tmp_path / "thesis" / "progress.txt"
    thesis.parent.mkdir()
    thesis.write_text("chapter 2: to do\n")
    assert main(["learn", "hint", "1", "--dir", "thesis"]) == 2
    assert main(["learn", "start", "thesis"]) == 2
    assert thesis.read_text() == "chapter 2: to do\n"
    course = Course.start(tmp_path / "mine")
    progress, text = course.folder / "progress.txt", course.home(lessons()[0]) / "README.md"
    progress.write_text(progress.read_text() + "a note of mine\n01_data_wall hints " + "9" * 5000 + "\n")
    text.write_text("my notes")
    course.next_hint(lessons()[2])
    Course.start(tmp_path / "mine")
    assert "a note of mine" in progress.read_text()
    assert text.read_text() == "my notes"


def test_two_commands_in_one_course(tmp_path: Path) -> None:
    watching = Course.start(tmp_path / "mine")
    first, second, third = lessons()[:3]
    other = Course.at(tmp_path / "mine")
    other.pass_(second, "abc")
    other.next_hint(third)
    watching.pass_(first, "def")  # which it knew nothing of
    found = Course.at(tmp_path / "mine")
    assert found.passed == {first.slug: "def", second.slug: "abc"}
    assert found.hints == {third.slug: 1}


@pytest.mark.parametrize("kind", ["latin", "loop", "link", "folder"])
def test_reset_of_whatever_is_there(kind: str, tmp_path: Path) -> None:
    course, lesson = Course.start(tmp_path / "mine"), lessons()[4]
    file = course.file(lesson)
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text("mine")
    file.unlink()
    match kind:
        case "latin":
            file.write_bytes(b"# caf\xe9\n")
        case "loop":
            file.symlink_to("exercise.py")
        case "link":
            file.symlink_to(elsewhere)
        case "folder":
            file.mkdir()
            with pytest.raises(UserError, match="move it away"):
                course.reset(lesson)
            return
    kept = course.reset(lesson)
    assert file.read_text() == lesson.skeleton
    assert elsewhere.read_text() == "mine"
    assert (kept is not None) == (kind != "loop")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["learn", "begin"], "there are start, list, next"),
        (["learn", "check"], "is no course; start one: lockstep learn start"),
        (["learn", "start", "file"], "file is a file"),
        (["learn", "start", "full"], "has other things in it"),
        (["learn", "strat"], "did you mean start?"),
        (["learn", "list", "--watch"], "--watch is for lockstep learn check"),
        (["learn", "list", "3"], "learn list shows all lessons"),
        (["learn", "start", "a", "--dir", "b"], "two folders"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_lesson_has_many_names() -> None:
    first = lessons()[0]
    assert (
        lesson_named("1") == lesson_named("01") == lesson_named(first.name) == lesson_named(first.slug + "/") == first
    )
    assert lesson_named("04_all_reduce/exercise.py") == lesson_named("ALL_REDUCE") == lessons()[3]
    with pytest.raises(UserError, match="there is no lesson 'ninety'"):
        lesson_named("ninety")
    with pytest.raises(UserError, match="did you mean all_reduce"):
        lesson_named("all_redcue")


@pytest.mark.slow
def test_an_exercise_that_never_ends_is_cut(tmp_path: Path) -> None:
    lesson = lessons()[0]
    begin = "    losses: list[float] = []\n"
    text = lesson.solution.replace(begin, begin + "    while True:\n        pass\n")
    file = tmp_path / "exercise.py"
    file.write_text(text)
    outcome = check(lesson, file)
    assert not outcome.passed
    assert re.search(r"did not end within 10 s: it is at exercise.py line \d+", outcome.problem)


FIRST, THIRD = lessons()[0].solution, lessons()[2].solution
ODD = {  # what an exercise may do -> its lesson, its file, what is said of it; None: it passes all the same
    "leaves": (1, "import os; os._exit(0)\n", "os._exit(0) at exercise.py line 1"),
    "leaves in good order": (1, "import sys; sys.exit(0)\n", "SystemExit: 0"),
    "one rank leaves": (
        3,
        "import os, torch.distributed as d\nif d.get_rank() == 1: os._exit(0)\n" + THIRD,
        "on rank 1: os._exit(0) at exercise.py line 2",
    ),
    "is interrupted": (1, "raise KeyboardInterrupt\n", "exercise.py line 1, in <module>: KeyboardInterrupt"),
    "is empty": (3, "", "exercise.py has no 'start_alike'"),
    "meets what torch has not": (
        1,
        FIRST.replace("loss = mean_squared_error(model(x), y)", "loss = nn.Module()(x)"),
        "in train: NotImplementedError: Module [Module] is missing",
    ),
    "is no text": (1, "x = 1\0\n", "exercise.py line 1: source code string cannot contain null bytes"),
    "gives nothing": (
        3,
        THIRD.replace("return places if first", "return [None] * len(places) if first"),
        "the check cannot use what exercise.py gave: TypeError",
    ),
    "sends other bytes": (
        3,
        THIRD.replace("dist.all_gather(places, value)", "dist.all_gather(places, value)\n    cut(value)")
        + "\ndef cut(value):\n    dist.all_reduce(value[: 1 + 9 * dist.get_rank()].clone())\n",
        "came where a rank expects",
    ),
    "leaves a thread": (
        1,
        "import threading, time\nthreading.Thread(target=time.sleep, args=(300,)).start()\n" + FIRST,
        None,
    ),
    "leaves a process": (3, "import subprocess; subprocess.Popen(['sleep', '297'])\n" + THIRD, None),
    "changes torch": (
        1,
        "import torch; torch.set_grad_enabled(False); torch.set_default_dtype(torch.float64)\n" + FIRST,
        None,
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_exercises(name: str, tmp_path: Path) -> None:
    number, text, said = ODD[name]
    outcome = outcome_of(lesson_named(str(number)), text, tmp_path)
    assert outcome.passed == (said is None), outcome.problem
    assert (said or "") in outcome.problem
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 297" not in running


@pytest.mark.slow
def test_an_exercise_that_cannot_be_left_is_ended(tmp_path: Path) -> None:
    text = "import time\nwhile True:\n    try: time.sleep(1)\n    except BaseException: pass\n"
    outcome = outcome_of(lessons()[0], text, tmp_path, patience=1)
    assert "it did not end within 20 s" in outcome.problem
    assert "rank 0: exercise.py line 3" in outcome.problem


@pytest.mark.slow
def test_watching_grades_whenever_the_file_is_saved(tmp_path: Path) -> None:
    first, second = lessons()[:2]
    course = Course.start(tmp_path / "mine")
    command = [sys.executable, "-u", "-m", "lockstep", "learn", "check", "--watch", "--dir", str(course.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as watching:
        assert watching.stdout is not None
        limit = threading.Timer(LONG, watching.kill)
        limit.start()
        try:
            seen = said_until(watching.stdout, "not yet")
            assert "predict first" in seen
            course.file(first).write_text(first.solution)
            said_until(watching.stdout, "passed in")
            assert second.slug in said_until(watching.stdout, "watching")  # on to the next one
            watching.send_signal(signal.SIGINT)
            assert watching.wait() == 130
        finally:
            limit.cancel()
            watching.kill()


def said_until(stream: IO[str], word: str) -> str:
    seen = ""
    for line in stream:
        seen += line
        if word in line:
            return seen
    raise AssertionError(f"{word!r} never came:\n{seen}")
