"""The learner's folder: a lesson in each of its folders, and a small text file of what has passed.

    progress.txt    # Lockstep course
                    01_data_wall passed 3f9a0c27d1e4
                    02_two_copies hints 1

A lesson that has passed is not run again until its file changes: the last word of its line is the file's fingerprint.
Lines of a person's own stay. Two commands may be at work in one course: a change is made to what the file says by then.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import UserError
from lockstep.learn.lesson import Lesson, lesson_named, lessons
from lockstep.results.whole import write_whole

PROGRESS, EXERCISE, TEXT = "progress.txt", "exercise.py", "README.md"
HEADER = "# Lockstep course"
"""The first line of its progress: other people have files of that name too."""
DEFAULT = "lockstep-course"
"""The folder of `learn start` without a name."""
WELCOME = """\
# Distributed training, built by hand

{count} lessons, from one process to many. In each folder: `README.md`, the text, and `exercise.py`, the one file
to fill in. In this folder:

    lockstep learn next              what comes next
    lockstep learn check --watch     grades the lesson whenever you save it, on real ranks
    lockstep learn hint              a nudge; again for more
    lockstep learn list              how far you are

"""


@dataclass
class Course:
    """A folder that `learn start` has made."""

    folder: Path
    passed: dict[str, str] = field(default_factory=dict)
    """Folder of a lesson -> fingerprint of the file that passed."""
    hints: dict[str, int] = field(default_factory=dict)
    """Folder of a lesson -> how many of its hints were shown."""
    others: list[str] = field(default_factory=list)
    """Lines of a person's own."""

    # ---- the folder ------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, folder: Path) -> "Course":
        """Lay it out. What is there already stays as it is: lessons that are missing are added."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; name a folder for the course")
        course = cls(folder)
        if not course.is_one() and folder.exists() and any(folder.iterdir()):
            strange = next(folder.iterdir()).name
            raise UserError(f"{folder} has other things in it ({strange}); name a new folder for the course")
        rows = "".join(f"{o.number:>3}. [{o.manifest.title}]({o.slug}/{TEXT})\n" for o in lessons())
        files = {folder / TEXT: WELCOME.format(count=len(lessons())) + rows}
        for lesson in lessons():
            files[course.home(lesson) / TEXT] = lesson.text
            files[course.file(lesson)] = lesson.skeleton
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with course.changing():
                pass  # it is a course from now on: what is missing after a failure is added by the next start
            for file, text in files.items():
                file.parent.mkdir(exist_ok=True)
                if not file.exists():
                    write_whole(file, text)
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}); choose another folder") from None
        return course

    @classmethod
    def at(cls, folder: Path) -> "Course":
        """The course of this folder, or of one above it, as git finds its repository."""
        here = folder.resolve()
        for home in (here, *here.parents, here / DEFAULT):
            course = cls(home)
            if course.is_one():
                course._read()
                return course
        raise UserError(f"{folder} is no course; start one: lockstep learn start")

    def is_one(self) -> bool:
        try:
            with (self.folder / PROGRESS).open(encoding="utf-8", errors="replace") as stream:
                return stream.readline(100).startswith(HEADER)
        except OSError:
            return False

    def home(self, lesson: Lesson) -> Path:
        return self.folder / lesson.slug

    def file(self, lesson: Lesson) -> Path:
        return self.home(lesson) / EXERCISE

    def reset(self, lesson: Lesson) -> Path | None:
        """The skeleton again; what was there is kept beside it."""
        file, kept = self.file(lesson), None
        if file.is_dir() or (file.parent.exists() and not file.parent.is_dir()):
            place = file if file.is_dir() else file.parent
            raise UserError(f"{place} is not what a course has there; move it away, and reset again")
        file.parent.mkdir(exist_ok=True)
        if file.is_file() and file.read_bytes() != lesson.skeleton.encode():
            kept = next(p for n in range(1, 10_000) if not (p := file.with_name(f"exercise.{n}.old")).exists())
            try:
                shutil.copyfile(file, kept)
            except OSError as error:
                kept.unlink(missing_ok=True)
                raise UserError(f"{file} cannot be kept as {kept.name} ({error.strerror}); nothing changed") from None
        if file.is_symlink():
            file.unlink()  # the link, not what it leads to
        write_whole(file, lesson.skeleton)
        with self.changing():
            self.passed.pop(lesson.slug, None)
            self.hints.pop(lesson.slug, None)
        return kept

    # ---- how far one is --------------------------------------------------------------------------------------

    def has_passed(self, lesson: Lesson) -> bool:
        """As the file is now."""
        return self.passed.get(lesson.slug) == self.fingerprint(lesson)

    def has_passed_before(self, lesson: Lesson) -> bool:
        return lesson.slug in self.passed

    def fingerprint(self, lesson: Lesson) -> str | None:
        try:
            return hashlib.sha256(self.file(lesson).read_bytes()).hexdigest()[:12]
        except OSError:
            return None

    def next(self) -> Lesson | None:
        """The first that has never passed; None: all have."""
        return next((lesson for lesson in lessons() if not self.has_passed_before(lesson)), None)

    def lesson(self, word: str | None, here: Path) -> Lesson:
        """The one that was named, the one whose folder this is, or the next."""
        if word is not None:
            return lesson_named(word)
        inside = here.resolve()
        for lesson in lessons():
            if inside == self.home(lesson).resolve():
                return lesson
        return self.next() or lessons()[-1]

    def pass_(self, lesson: Lesson, fingerprint: str) -> None:
        with self.changing():
            self.passed[lesson.slug] = fingerprint

    def next_hint(self, lesson: Lesson) -> int:
        """The number of the hint to show now, from 0; the last one again when all were shown."""
        with self.changing():
            shown = self.hints.get(lesson.slug, 0)
            self.hints[lesson.slug] = min(shown + 1, len(lesson.manifest.hints))
        return min(shown, len(lesson.manifest.hints) - 1)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """What is changed inside is written down, beside what others have written meanwhile."""
        place = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(place, fcntl.LOCK_EX)
            self._read()
            yield
            lines = [HEADER, *(f"{slug} passed {fingerprint}" for slug, fingerprint in sorted(self.passed.items()))]
            lines += [*(f"{slug} hints {count}" for slug, count in sorted(self.hints.items())), *self.others]
            write_whole(self.folder / PROGRESS, "".join(f"{line}\n" for line in lines))
        finally:
            os.close(place)

    def _read(self) -> None:
        self.passed, self.hints, self.others = {}, {}, []
        if not self.is_one():
            return
        try:
            text = (self.folder / PROGRESS).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UserError(f"{self.folder / PROGRESS} cannot be read ({error.strerror})") from None
        for line in text.splitlines()[1:]:
            match line.split():
                case [slug, "passed", fingerprint]:
                    self.passed[slug] = fingerprint
                case [slug, "hints", count] if count.isdecimal() and len(count) < 3:
                    self.hints[slug] = int(count)
                case _:
                    self.others.append(line)
