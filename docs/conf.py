"""The site: `make docs`. Pages read as plain Markdown too; this adds shelves, search, and the lessons' texts."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from lockstep.learn.lesson import lessons

project, author, copyright = "Lockstep", "The Lockstep authors", "The Lockstep authors"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "Lockstep"
html_show_sphinx = False
html_copy_source = False
exclude_patterns = ["_build", "_live"]
html_extra_path = ["_live"]
sys.path.insert(0, str(Path(__file__).parent))
suppress_warnings = ["myst.header"]
LESSONS = Path(__file__).parent / "lessons"
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)([^)]+)\)")
"""A link to the source, which the site does not have: its words stay."""
TO_A_LESSON = re.compile(r"\]\(\.\./src/lockstep/learn/lessons/(\w+)/text\.md\)")


def make_lessons(app: Any) -> None:
    """The texts of the course, where the site looks for pages."""
    shutil.rmtree(LESSONS, ignore_errors=True)
    LESSONS.mkdir()
    for lesson in lessons():
        (LESSONS / f"{lesson.slug}.md").write_text(lesson.text, encoding="utf-8")


def make_live_pages(app: Any, config: Any) -> None:
    from make_live import write

    write()


def mend_links(app: Any, page: str, source: list[str]) -> None:
    slugs = {lesson.name: lesson.slug for lesson in lessons()}
    text = TO_A_LESSON.sub(lambda found: f"](lessons/{slugs[found[1]]}.md)", source[0])
    source[0] = OUTSIDE.sub(r"\1", text)


def setup(app: Any) -> None:
    app.connect("config-inited", make_live_pages)
    app.connect("builder-inited", make_lessons)
    app.connect("source-read", mend_links)
