"""What a lesson is: one folder with a text, a master of the exercise, a manifest and a grader."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import TypeAdapter

from lockstep.errors import UserError
from lockstep.learn.master import SKELETON, SOLUTION, render, wrong_names

if TYPE_CHECKING:
    from lockstep.learn.rank import Rank

LESSONS = Path(__file__).parent / "lessons"
MANIFEST, TEXT, MASTER = "lesson.yaml", "text.md", "master.py"
MOST_LINES = 80
"""Of a file that is to be filled in."""


@dataclass(frozen=True)
class Prediction:
    """A number that the learner says before the run."""

    name: str
    """Of a constant in the exercise."""
    asks: str
    because: str
    """The arithmetic, for a learner who got another number."""
    unit: str = ""


@dataclass(frozen=True)
class Manifest:
    """`lesson.yaml`."""

    number: int
    title: str
    minutes: int
    """That it takes: 20 to 60."""
    ranks: list[int]
    """How many ranks it is graded on, one after the other."""
    hints: list[str]
    """From a nudge to nearly all of it."""
    wrong: dict[str, str]
    """Wrong solutions of the master -> what the grader must say of each."""
    home: str
    """Where in Lockstep the idea lives in full."""
    needs: list[int] = field(default_factory=list)
    """Lessons whose ideas it uses."""
    covers: list[str] = field(default_factory=list)
    """Names under which others teach it."""
    predict: list[Prediction] = field(default_factory=list)
    seconds: float = 10.0
    """After which a check is cut short."""


@dataclass(frozen=True)
class Lesson:
    """A folder of the course: text, manifest, grader, and the master of its exercise."""

    name: str
    """data_wall"""
    folder: Path
    manifest: Manifest

    @property
    def number(self) -> int:
        return self.manifest.number

    @property
    def home(self) -> Path:
        """Where the idea lives in full, wherever Lockstep is installed."""
        return LESSONS.parents[1] / self.manifest.home.removeprefix("src/lockstep/")

    @property
    def slug(self) -> str:
        """Of its folder in the learner's course."""
        return f"{self.number:02d}_{self.name}"

    @cached_property
    def text(self) -> str:
        return (self.folder / TEXT).read_text(encoding="utf-8")

    @cached_property
    def master(self) -> str:
        return (self.folder / MASTER).read_text(encoding="utf-8")

    @property
    def skeleton(self) -> str:
        return render(self.master, SKELETON)

    @property
    def solution(self) -> str:
        return render(self.master, SOLUTION)

    def wrong(self, name: str) -> str:
        return render(self.master, name)

    @property
    def wrong_names(self) -> list[str]:
        return wrong_names(self.master)

    @property
    def grade(self) -> Callable[["Rank"], None]:
        """Its grader, which runs on every rank."""
        return self._grader.grade

    def explain(self, logs: list[list[dict[str, Any]]]) -> str | None:
        """Of ranks that hung, or broke: the mistake that their calls show, where the lesson knows it."""
        found: str | None = self._grader.explain(logs) if hasattr(self._grader, "explain") else None
        return found

    def facts(self) -> list[str]:
        """The numbers of its text, computed."""
        return list(self._grader.facts())

    @property
    def _grader(self) -> Any:
        return importlib.import_module(f"lockstep.learn.lessons.{self.name}.grade")


@cache
def lessons() -> tuple[Lesson, ...]:
    """In the order of the course."""
    found = [_read(file.parent) for file in LESSONS.glob(f"*/{MANIFEST}")]
    return tuple(sorted(found, key=lambda lesson: lesson.number))


def _read(folder: Path) -> Lesson:
    values = yaml.safe_load((folder / MANIFEST).read_text(encoding="utf-8"))
    return Lesson(folder.name, folder, TypeAdapter(Manifest).validate_python(values))


def lesson_named(word: str) -> Lesson:
    """By number (5, 05), name (naive_dp), folder (05_naive_dp), or a file of it."""
    wanted = [part.lower() for part in (Path(word).name, Path(word).parent.name) if part]
    for lesson in lessons():
        if {lesson.name, lesson.slug, str(lesson.number), f"{lesson.number:02d}"} & set(wanted):
            return lesson
    near = get_close_matches(word.lower(), [name for o in lessons() for name in (o.name, o.slug)], 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    numbers = f"{lessons()[0].number} to {lessons()[-1].number}"
    raise UserError(f"there is no lesson {word!r}{meant}; say its number ({numbers}) or its name: lockstep learn list")
