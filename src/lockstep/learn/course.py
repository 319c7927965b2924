"""The learner's folder: a lesson in each of its folders, and a small text file of what has passed.

    progress.txt    01_data_wall passed 3f9a0c27d1e4
                    02_two_copies hints 1

A lesson that has passed is not run again until its file changes: the last word of its line is the file's fingerprint.
"""

import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import UserError
from lockstep.learn.lesson import Lesson, lesson_named, lessons
from lockstep.results.whole import write_whole

PROGRESS, EXERCISE, TEXT = "progress.txt", "exercise.py", "README.md"
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

    # ---- the folder ------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, folder: Path) -> "Course":
        """Lay it out. What is there already stays as it is: lessons that are missing are added."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; name a folder for the course")
        strange = [f for f in folder.iterdir() if f.name != PROGRESS] if folder.exists() else []
        if strange and not (folder / PROGRESS).exists():
            raise UserError(f"{folder} has other things in it ({strange[0].name}); name a new folder for the course")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            course = cls.at(folder) if (folder / PROGRESS).exists() else cls(folder)
            course.save()
            for lesson in lessons():
                home = course.home(lesson)
                home.mkdir(exist_ok=True)
                write_whole(home / TEXT, lesson.text)
                if not course.file(lesson).exists():
                    write_whole(course.file(lesson), lesson.skeleton)
            rows = "".join(f"{o.number:>3}. [{o.manifest.title}]({o.slug}/{TEXT})\n" for o in lessons())
            write_whole(folder / TEXT, WELCOME.format(count=len(lessons())) + rows)
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}); choose another folder") from None
        return course

    @classmethod
    def at(cls, folder: Path) -> "Course":
        """The course of this folder, or of one above it, as git finds its repository."""
        here = folder.resolve()
        for home in (here, *here.parents, here / DEFAULT):
            if (home / PROGRESS).is_file():
                return cls(home)._read()
        raise UserError(f"{folder} is no course; start one: lockstep learn start")

    def home(self, lesson: Lesson) -> Path:
        return self.folder / lesson.slug

    def file(self, lesson: Lesson) -> Path:
        return self.home(lesson) / EXERCISE

    def reset(self, lesson: Lesson) -> Path | None:
        """The skeleton again; what was there is kept beside it."""
        file, kept = self.file(lesson), None
        file.parent.mkdir(exist_ok=True)
        if file.exists() and file.read_text(encoding="utf-8") != lesson.skeleton:
            kept = next(p for n in range(1, 10_000) if not (p := file.with_name(f"exercise.{n}.old")).exists())
            shutil.copyfile(file, kept)
        write_whole(file, lesson.skeleton)
        self.passed.pop(lesson.slug, None)
        self.hints.pop(lesson.slug, None)
        self.save()
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
        self.passed[lesson.slug] = fingerprint
        self.save()

    def next_hint(self, lesson: Lesson) -> int:
        """The number of the hint to show now, from 0; the last one again when all were shown."""
        shown = self.hints.get(lesson.slug, 0)
        self.hints[lesson.slug] = min(shown + 1, len(lesson.manifest.hints))
        self.save()
        return min(shown, len(lesson.manifest.hints) - 1)

    def save(self) -> None:
        lines = [f"{slug} passed {fingerprint}" for slug, fingerprint in sorted(self.passed.items())]
        lines += [f"{slug} hints {count}" for slug, count in sorted(self.hints.items())]
        try:
            write_whole(self.folder / PROGRESS, "".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise UserError(f"{self.folder / PROGRESS} cannot be written ({error.strerror})") from None

    def _read(self) -> "Course":
        """Lines that we do not know are left out: a person may have edited the file."""
        for line in (self.folder / PROGRESS).read_text(encoding="utf-8", errors="replace").splitlines():
            match line.split():
                case [slug, "passed", fingerprint]:
                    self.passed[slug] = fingerprint
                case [slug, "hints", count] if count.isdecimal():
                    self.hints[slug] = int(count)
        return self
