"""Fills what the pages mark: tables that are computed, and code that stands elsewhere.

    <!-- constants -->                             the planner's constants
    <!-- matrix -->                                the scenarios of lockstep choose
    <!-- others -->                                words of other tools, and ours
    <!-- code: examples/my_nets.py -->             a file, without its docstring
    <!-- code: examples/own_loop.py: train -->     a function or class of it
    <!-- code: lockstep.Pipeline -->               the example of a docstring
    <!-- output: 20 of lockstep plan ... -->       the first lines that a command prints which needs no ranks

each up to `<!-- end -->`.

python docs/fill_pages.py
"""

import ast
import inspect
import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from make_api import examples

import lockstep
from lockstep.cli import main
from lockstep.cli.others import tables
from lockstep.cli.plan import known_network
from lockstep.plan.choose import SCENARIOS, matrix
from lockstep.plan.constants import entries
from lockstep.plan.machine import parse_cluster

DOCS = Path(__file__).parent
MARK = re.compile(
    r"(<!-- (constants|matrix|others|code: [^>]+|output: [^>]+) -->\n).*?((?<=\n)<!-- end -->)", flags=re.DOTALL
)


def constants_table() -> str:
    lines = ["| constant | value | what it stands for | from |", "| --- | --- | --- | --- |"]
    for name, entry in entries().items():
        lines.append(f"| `{name}` | {entry['value']:g} | {entry['says']} | {entry['from']} |")
    return "\n".join(lines)


def matrix_table() -> str:
    networks = {s.model: known_network(s.model, None) for s in SCENARIOS}
    return "\n".join(matrix(networks, {s.cluster: parse_cluster(s.cluster) for s in SCENARIOS}))


TABLES: dict[str, Callable[[], str]] = {"constants": constants_table, "matrix": matrix_table, "others": tables}


def code(place: str) -> str:
    """As a fenced block."""
    if place.startswith("lockstep."):
        found = examples(inspect.getdoc(getattr(lockstep, place.removeprefix("lockstep."))) or "")
        return f"```python\n{found.strip()}\n```"
    name, _, part = place.partition(": ")
    source = (DOCS.parent / name).read_text(encoding="utf-8")
    if name.endswith(".yaml"):
        return f"```yaml\n{source.strip()}\n```"
    lines, nodes = source.splitlines(), ast.parse(source).body
    if not part:
        first = 1 if isinstance(nodes[0], ast.Expr) else 0
        return "```python\n" + "\n".join(lines[nodes[first].lineno - 1 :]) + "\n```"
    node = next(n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part)
    return "```python\n" + "\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n```"


def output(place: str) -> str:
    """As a terminal of 120 columns without colours shows it."""
    count, command = place.split(" of ", 1)
    said = StringIO()
    with redirect_stdout(said):
        assert main(shlex.split(command)[1:]) == 0, command
    lines = [line.rstrip() for line in said.getvalue().splitlines()]
    shown = [*lines[: int(count)], *(["..."] if len(lines) > int(count) else [])]
    return "\n".join(["```", f"$ {command}", *shown, "```"])


def filled(page: str) -> str:
    """The page as it would be written now."""

    def fill(found: re.Match[str]) -> str:
        kind = found[2]
        if kind in TABLES:
            return f"{found[1]}{TABLES[kind]()}\n{found[3]}"
        what, place = kind.split(": ", 1)
        return f"{found[1]}{code(place) if what == 'code' else output(place)}\n{found[3]}"

    return MARK.sub(fill, (DOCS / page).read_text(encoding="utf-8"))


def pages() -> list[str]:
    return [page.name for page in sorted(DOCS.glob("*.md")) if MARK.search(page.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    for page in pages():
        (DOCS / page).write_text(filled(page), encoding="utf-8")
        print(DOCS / page)
