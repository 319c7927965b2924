"""Every lesson: its skeleton fails with its own message, its solution passes, known mistakes are called by name."""

import re
from math import ceil, floor
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.learn.check import Outcome, check
from lockstep.learn.lesson import MOST_LINES, Lesson, lesson_named, lessons
from lockstep.learn.master import parse, render, wrong_names
from tests.learn_trials import TRIALS, written

IN_ORDER = [pytest.param(lesson, id=lesson.slug) for lesson in lessons()]
WRONG = [pytest.param(lesson, name, id=f"{lesson.slug}-{name}") for lesson in lessons() for name in lesson.wrong_names]


BUSY = 30.0
"""No check fails because the machine is busy; what is meant to hang is cut as it would be for a learner."""
HANG = {"from-itself", "same-neighbour", "blocking", "hooks-order", "blocking-sends"}


def outcome_of(lesson: Lesson, text: str, folder: Path, slowdown: float = BUSY) -> Outcome:
    file = folder / "exercise.py"
    file.write_text(text)
    return check(lesson, file, slowdown=slowdown)


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
    outcome = outcome_of(lesson, lesson.wrong(name), tmp_path, 1.0 if name in HANG else BUSY)
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
    outcome = outcome_of(lesson, lesson.wrong("blocking"), tmp_path, slowdown=1)
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
