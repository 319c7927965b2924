"""The course of a learner: its folder, its commands, what has passed, and that nothing of theirs is lost."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from lockstep.cli import main
from lockstep.errors import UserError
from lockstep.learn.course import Course
from lockstep.learn.lesson import lesson_named, lessons
from tests.ranks import LONG


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
