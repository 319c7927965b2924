"""One marked-up file makes them all: the skeleton that a learner gets, the solution, and wrong solutions by name.

A master is the solution, and runs as it is. What a learner is to write stands in a region; its other forms follow it as
comments:

    #: solution
    gradient /= ranks
    #: todo divide by the number of ranks
    #: wrong sum
    # pass
    #: end

`todo` is the skeleton that raises `NotImplementedError` with those words; one that is other code, such as a constant,
stands as comments below `#: skeleton`. Outside of regions nothing differs. A wrong solution that a region does not name
is the solution there.
"""

import json
import re
from dataclasses import dataclass

from lockstep.errors import UserError

MARK = re.compile(r"(\s*)#: (?:(solution|skeleton|end)|todo (.+)|wrong ([a-z][a-z0-9-]*))\s*")
SOLUTION, SKELETON = "solution", "skeleton"


@dataclass(frozen=True)
class Region:
    """The forms of one place of the file, as lines."""

    forms: dict[str, list[str]]

    def form(self, variant: str) -> list[str]:
        return self.forms.get(variant, self.forms[SOLUTION])


def parse(text: str) -> list[str | Region]:
    """Lines that all forms share, and regions."""
    parts: list[str | Region] = []
    forms: dict[str, list[str]] | None = None
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = MARK.fullmatch(line)
        if mark is None:
            if forms is None:
                parts.append(line)
            else:
                forms[current].append(line if current == SOLUTION else _uncommented(line, number))
            continue
        indent, plain, todo, wrong = mark.groups()
        if plain == SOLUTION:
            _must(forms is None, number, "a region begins inside another")
            forms, current = {SOLUTION: []}, SOLUTION
        elif plain == "end":
            _must(forms is not None and SKELETON in forms, number, "a region ends without a skeleton")
            assert forms is not None
            parts.append(Region(forms))
            forms = None
        else:
            current = wrong or SKELETON
            _must(forms is not None and current not in forms, number, f"{current} stands outside a region, or twice")
            assert forms is not None
            forms[current] = [f"{indent}raise NotImplementedError({quoted(todo)})"] if todo else []
    _must(forms is None, len(text.splitlines()), "a region does not end")
    return parts


def render(text: str, variant: str) -> str:
    """`solution`, `skeleton`, or the name of a wrong one."""
    lines: list[str] = []
    for part in parse(text):
        lines += [part] if isinstance(part, str) else part.form(variant)
    return "\n".join(lines) + "\n"


def wrong_names(text: str) -> list[str]:
    names = [name for part in parse(text) if isinstance(part, Region) for name in part.forms]
    return [name for name in dict.fromkeys(names) if name not in (SOLUTION, SKELETON)]


def quoted(text: str) -> str:
    """As Python, in double quotes, whatever is in it."""
    return json.dumps(text, ensure_ascii=False)


def _uncommented(line: str, number: int) -> str:
    if not line.strip():
        return line
    match = re.fullmatch(r"(\s*)#(?: (.*))?", line)
    _must(match is not None, number, "what is not the solution stands as a comment")
    assert match is not None
    return (match[1] + (match[2] or "")).rstrip()


def _must(true: bool, line: int, otherwise: str) -> None:
    if not true:
        raise UserError(f"line {line} of the master: {otherwise}")
