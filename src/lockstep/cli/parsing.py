"""Flags to dataclasses, and files that are to be written. Nothing here needs torch."""

import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import tyro

from lockstep.errors import UserError

T = TypeVar("T")


def parse(cls: type[T], argv: list[str], command: str, default: T | None = None) -> T:
    """Flags -> dataclass; the class's docstring is the help text. A wrong flag is one line, as every mistake."""
    options: dict[str, Any] = {"config": (tyro.conf.AvoidSubcommands,)}
    if default is not None:
        options["default"] = default
    said = StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(cls, args=argv, prog=f"lockstep {command}", **options)
    except SystemExit as leaving:
        if leaving.code in (0, None):  # --help
            raise
        raise UserError(f"{on_one_line(said.getvalue())}; see lockstep {command.split(' ')[0]} --help") from None


def on_one_line(box: str) -> str:
    """What tyro says in a box of several lines, of which the first ones name the mistake."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts = " ".join(line if line.strip("─") else "\n" for line in lines).split("\n")
    mistake = parts[0].strip().rstrip(".")
    unknown = re.match(r"Unrecognized options: (--[^ ,]+)", mistake)
    if unknown is None:
        mistake = mistake.removeprefix("Error parsing ")
        for kind, wanted in (("INT", "a whole number"), ("FLOAT", "a number")):
            mistake = re.sub(
                rf"no type matching (?:{{None}}\|)?{kind} could be instantiated from \['([^']*)'\]",
                rf"\1 was given, which is not {wanted}",
                mistake,
            )
        return mistake
    meant = re.search(r"Perhaps you meant:\s+(--[^ ,]+)", box.replace("│", " "))
    return f"unknown flag {unknown[1]}" + (f"; did you mean {meant[1]}?" if meant else "")


def refuse_positional(argv: list[str], command: str) -> None:
    """Commands without a config file: say what a stray word is not."""
    if argv and not argv[0].startswith("-"):
        raise UserError(f"lockstep {command} takes flags only, but was given {argv[0]!r}")


def check_outputs(csv: str | None, json: str | None, plot: str | None) -> None:
    """Refuse files that cannot be written before the work is done, not after."""
    given = [(flag, file) for flag, file in (("--csv", csv), ("--json", json), ("--plot", plot)) if file is not None]
    for flag, file in given:
        check_output(flag, file)
    files = [file for _, file in given]
    for file in files:
        if files.count(file) > 1:
            raise UserError(f"{file} was given for two kinds of output; give each its own file")


def check_output(flag: str, file: str) -> None:
    path = Path(file)
    if path.is_dir():
        raise UserError(f"{flag} {file}: that is a folder; name a file")
    if flag == "--plot" and path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {file}: name a file that ends in .png, .svg or .pdf")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{flag} {file}: there is no folder {folder}; make it first")
    was_there = path.exists()
    if was_there and not path.is_file():
        return  # a device or a pipe
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{flag} {file} cannot be written ({error.strerror}); choose another place") from None
    if not was_there:
        path.resolve().unlink(missing_ok=True)  # under torchrun another rank may have been quicker
