"""A page in one file: its data, style and scripts inside, light and dark, nothing fetched. Reports, plans and schedules
are made of it.
"""

import json
import re
from html import escape
from importlib.resources import files
from typing import Any

from lockstep.results.palette import style_sheet


def framed(title: str, body: str, data: Any, script: str, style: str = "", library: str = "") -> str:
    """`data`: what the script reads as JSON from the element `data`. `library`: of charts, if the page has some."""
    asset = files("lockstep.results") / "assets"
    page = (asset / "page.html").read_text(encoding="utf-8")
    parts = {
        "title": escape(title),
        "style": "\n".join([style_sheet(), (asset / "style.css").read_text(encoding="utf-8"), style]),
        "body": body,
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "library": library,
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def assets(package: str) -> tuple[str, str, str]:
    """(body, script, style) that lie in a package's `assets`."""
    body, script, style = (
        (files(package) / "assets" / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "js", "css")
    )
    return body, script, style
