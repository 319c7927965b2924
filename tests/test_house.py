"""The house stands: a file knows the floors below it and never the ones above."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "lockstep"
FLOORS = (
    ("errors", "words", "intervals", "bar", "strange", "uncompiled", "leaving", "lazy", "apart"),
    ("layout", "launch", "config", "results"),
    ("comm", "models", "data"),
    ("parallel",),
    ("strategies",),
    ("checkpoint", "measure"),
    ("training", "inference"),
    ("demo", "verify", "bench", "profile", "schedule", "plan", "doctor", "chaos", "report", "learn", "judge"),
    ("cli",),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FACES = ("__init__", "__main__")
"""The package's own: they name what is inside."""


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(file: Path) -> set[str]:
    """Rooms that a file imports from, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"lockstep.{alias.name}" for alias in node.names if node.module == "lockstep"]
        found |= {name.split(".")[1] for name in names if name.startswith("lockstep.")}
    return found


FILES = [file for file in sorted(SOURCE.rglob("*.py")) if room_of(file) not in FACES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_file_knows_only_the_floors_below(file: Path) -> None:
    floor = FLOOR_OF[room_of(file)]
    above = {room for room in imported(file) if FLOOR_OF.get(room, -1) > floor}
    assert not above, f"{file.relative_to(SOURCE)} is on the floor of {FLOORS[floor]} and knows {sorted(above)}"


def test_every_room_has_a_floor_and_every_floor_its_rooms() -> None:
    rooms = {room_of(file) for file in FILES}
    assert rooms == set(FLOOR_OF)


def test_rooms_of_one_floor_do_not_know_each_other_in_a_circle() -> None:
    knows = {room: set().union(*(imported(f) for f in FILES if room_of(f) == room)) for room in FLOOR_OF}
    for room in FLOOR_OF:
        seen, front = set(), {room}
        while front:
            front = {r for known in front for r in knows[known] if FLOOR_OF.get(r) == FLOOR_OF[room] and r != known}
            assert room not in front, f"{room} knows itself by way of its neighbours"
            front -= seen
            seen |= front


MODULES = {".".join(["lockstep", *file.relative_to(SOURCE).with_suffix("").parts]): file for file in FILES}


def modules_known_to(file: Path) -> set[str]:
    """By an import anywhere in it, but for what only a type checker reads."""
    tree, found = ast.parse(file.read_text()), set()
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    only_types = {inner for node in checks for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in only_types:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(MODULES)


def test_no_files_know_each_other_in_a_circle() -> None:
    """Files that nobody knows any more are taken away until none is left, or a circle."""
    knows = {name: modules_known_to(file) for name, file in MODULES.items()}
    while leaves := [name for name, others in knows.items() if not others & knows.keys()]:
        for name in leaves:
            del knows[name]
    assert not knows, f"in a circle, or above one: {sorted(knows)[:12]}"


def test_every_class_says_what_it_is() -> None:
    """But in exercises, whose text says it."""
    silent = [
        f"{file.relative_to(SOURCE)} {node.name}"
        for file in sorted(SOURCE.rglob("*.py"))
        if file.name != "master.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and ast.get_docstring(node) is None
    ]
    assert silent == []
