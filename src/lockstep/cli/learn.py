"""`lockstep learn`."""

import difflib
import os
import shlex
import time
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import tyro
from rich.markdown import Markdown
from rich.syntax import Syntax

from lockstep.cli import ctrl_c_waits
from lockstep.cli.parsing import parse
from lockstep.cli.tables import console, new_table
from lockstep.errors import UserError
from lockstep.learn.course import DEFAULT, Course
from lockstep.learn.lesson import Lesson, lessons
from lockstep.words import counted

VERBS = ("start", "list", "next", "check", "hint", "diff", "solution", "reset")
Verb = Annotated[str, tyro.conf.arg(metavar="VERB", help_behavior_hint=""), tyro.conf.Positional]
Which = Annotated[str, tyro.conf.arg(metavar="[LESSON]", help_behavior_hint=""), tyro.conf.Positional]
LOOK_EVERY = 0.3
"""Seconds between two looks at a file that is watched."""


@dataclass
class LearnArguments:
    """Build distributed training by hand, and have it graded on real ranks: lockstep learn VERB [LESSON].

    start [DIR]: lay out the course in a folder; list: all lessons, and which have passed; next: the text of the one
    that comes next; check [LESSON]: grade it; hint [LESSON]: a nudge, then more; solution [LESSON]: the reference; diff
    [LESSON]: yours beside the reference; reset [LESSON]: the skeleton again. LESSON is a number or a name; without it,
    the one whose folder this is, or the next.

    For example:

    lockstep learn start

    cd lockstep-course && lockstep learn check --watch

    lockstep learn check 4 --share-gpu
    """

    verb: Verb = ""
    """start, list, next, check, hint, diff, solution or reset."""
    lesson: Which = ""
    """A number or a name; of start, the folder to make."""
    watch: bool = False
    """check: again whenever the file is saved, on to the next lesson when it passes; Ctrl-C ends it."""
    share_gpu: bool = False
    """check: on ranks that share one GPU, by NCCL, instead of CPU ranks."""
    dir: str = "."
    """The course's folder, or one inside it."""


def main(argv: list[str]) -> int:
    arguments = parse(LearnArguments, argv or ["--help"], "learn")
    verb, named = arguments.verb, arguments.lesson or None
    if verb not in VERBS:
        meant = f"did you mean {near[0]}? " if (near := get_close_matches(verb, VERBS, 1)) else ""
        raise UserError(f"learn {verb or 'what?'}: {meant}there are {', '.join(VERBS)}; see lockstep learn --help")
    refuse_senseless(arguments)
    if verb == "start":
        return start(Path(named or (DEFAULT if arguments.dir == "." else arguments.dir)))
    course = Course.at(Path(arguments.dir))
    if verb == "list":
        return show_list(course)
    lesson = course.lesson(named, Path(arguments.dir))
    if verb == "check":
        if arguments.watch:
            return watch(course, lesson, named is None, arguments.share_gpu)
        return 0 if check_one(course, lesson, arguments.share_gpu) else 1
    actions = {"next": show_next, "hint": hint, "diff": diff, "solution": solution, "reset": reset}
    return actions[verb](course, lesson)


def refuse_senseless(arguments: LearnArguments) -> None:
    """A flag, or a lesson, that the verb would not look at."""
    verb = arguments.verb
    if verb != "check" and (arguments.watch or arguments.share_gpu):
        flag = "--watch" if arguments.watch else "--share-gpu"
        raise UserError(f"learn {verb}: {flag} is for lockstep learn check; leave it out")
    if verb == "list" and arguments.lesson:
        raise UserError(f"learn list shows all lessons; for one: lockstep learn next {arguments.lesson}")
    if verb == "start" and arguments.lesson and arguments.dir != ".":
        raise UserError(f"learn start: two folders, {arguments.lesson} and --dir {arguments.dir}; name one")


def start(folder: Path) -> int:
    course = Course.start(folder)
    first = course.next() or lessons()[0]
    begin = "go on" if course.passed else "begin"
    text = Path(first.slug) / "README.md"
    say(f"{counted(len(lessons()), 'lesson')} in {folder}; {begin} with {folder / text}, then")
    say(f"    cd {shlex.quote(str(folder))} && lockstep learn check --watch")
    return 0


def show_list(course: Course) -> int:
    table = new_table("", ("", "lesson"), ("minutes", "ranks"), ("file",))
    for lesson in lessons():
        mark = "✓" if course.has_passed(lesson) else "edited" if course.has_passed_before(lesson) else ""
        ranks = ", ".join(map(str, lesson.manifest.ranks))
        table.add_row(mark, f"{lesson.number:>2}. {lesson.manifest.title}", str(lesson.manifest.minutes), ranks,
                      f"{lesson.slug}/exercise.py")  # fmt: skip
    console().print(table)
    passed = sum(course.has_passed_before(lesson) for lesson in lessons())
    upcoming = course.next()
    say(f"{passed} of {len(lessons())} passed; next: {upcoming.slug if upcoming else 'none, you have done it all'}")
    return 0


def show_next(course: Course, lesson: Lesson) -> int:
    console().print(Markdown(lesson.text))
    say(f"fill in {course.file(lesson)}, then: lockstep learn check")
    return 0


def check_one(course: Course, lesson: Lesson, share_gpu: bool) -> bool:
    """Grade it unless it has passed as it is; whether it passes."""
    file = course.file(lesson)
    fingerprint = course.fingerprint(lesson)
    if fingerprint is None:
        raise unreadable(course, lesson)
    title = f"{lesson.number}. {lesson.manifest.title}"
    if course.has_passed(lesson) and not share_gpu:
        say(f"✓ {title}: has passed, and is unchanged since")
        return True
    with ctrl_c_waits():
        from lockstep.learn.check import check, shown  # torch, which takes seconds to load
    ranks = " and ".join(map(str, lesson.manifest.ranks))
    with console().status(f"{title}: {ranks} ranks" if ranks != "1" else title):
        outcome = check(lesson, file, share_gpu)
    if outcome.passed:
        course.pass_(lesson, fingerprint)  # first: whatever becomes of the terminal
    for line in shown(outcome):
        say(line)
    if not outcome.passed:
        say("")
        predicts = "predict first" in outcome.problem
        helps = "the rest is graded after that" if predicts else f"lockstep learn hint {lesson.number} helps"
        say(f"{title}: not yet ({outcome.seconds:.1f} s); {helps}")
        return False
    say(f"✓ {title}: passed in {outcome.seconds:.1f} s on {ranks} rank{'s' * (ranks != '1')}")
    say(f"  the reference beside yours: lockstep learn diff {lesson.number}; in full: {lesson.home}")
    upcoming = course.next()
    if upcoming is not None:
        say(f"  next: {course.home(upcoming) / 'README.md'}")
    return True


def unreadable(course: Course, lesson: Lesson) -> UserError:
    file = course.file(lesson)
    if file.is_file() and not os.access(file, os.R_OK):
        return UserError(f"{file} may not be read: chmod u+r {shlex.quote(str(file))}")
    return UserError(f"{file} cannot be read; lockstep learn reset {lesson.number} lays it out again")


def watch(course: Course, lesson: Lesson, goes_on: bool, share_gpu: bool) -> int:
    """Until Ctrl-C, or until there is no next lesson."""
    say(f"watching {course.file(lesson)}; Ctrl-C ends it")
    seen = None
    while True:
        current = course.fingerprint(lesson)
        if current != seen and current is not None:
            seen = current
            if check_one(course, lesson, share_gpu) and goes_on:
                upcoming = course.next()
                if upcoming is None:
                    return 0
                if upcoming != lesson:
                    lesson, seen = upcoming, course.fingerprint(upcoming)
                    say(f"\nwatching {course.file(lesson)}")
        time.sleep(LOOK_EVERY)


def hint(course: Course, lesson: Lesson) -> int:
    number = course.next_hint(lesson)
    hints = lesson.manifest.hints
    say(f"{lesson.number}. {lesson.manifest.title}, hint {number + 1} of {len(hints)}")
    console().print(Markdown(hints[number]))
    return 0


def diff(course: Course, lesson: Lesson) -> int:
    refuse_before(course, lesson, "diff")
    try:
        mine = course.file(lesson).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        raise unreadable(course, lesson) from None
    lines = list(difflib.unified_diff(mine, lesson.solution.splitlines(), "yours", "the reference", lineterm=""))
    if not lines:
        say("no difference")
    else:
        console().print(Syntax("\n".join(lines), "diff", background_color="default", word_wrap=True))
    say(f"in full: {lesson.home}")
    return 0


def solution(course: Course, lesson: Lesson) -> int:
    refuse_before(course, lesson, "solution")
    print(lesson.solution, end="")
    return 0


def refuse_before(course: Course, lesson: Lesson, verb: str) -> None:
    """The solution is shown after all hints."""
    if not course.has_passed_before(lesson) and course.hints.get(lesson.slug, 0) < len(lesson.manifest.hints):
        left = len(lesson.manifest.hints) - course.hints.get(lesson.slug, 0)
        raise UserError(
            f"learn {verb}: {lesson.slug} has not passed yet, and {counted(left, 'hint')} of it are left; "
            f"lockstep learn hint {lesson.number}"
        )


def reset(course: Course, lesson: Lesson) -> int:
    kept = course.reset(lesson)
    say(f"{course.file(lesson)} is the skeleton again" + (f"; yours is kept in {kept.name}" if kept else ""))
    return 0


def say(text: str) -> None:
    console().print(text, highlight=False, soft_wrap=True, markup=False)
