"""Flags to dataclasses, and files that are to be written. Nothing here needs torch."""

import ast
import inspect
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import is_dataclass
from io import StringIO
from itertools import chain, pairwise
from pathlib import Path
from textwrap import dedent, fill
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import tyro

from lockstep.cli.others import refuse_unless_known
from lockstep.config.check import check_word
from lockstep.errors import UserError

T = TypeVar("T")


def parse(cls: type[T], argv: list[str], command: str, default: T | None = None) -> T:
    """Flags -> dataclass; the class's docstring is the help text. A wrong flag is one line, as every mistake."""
    options: dict[str, Any] = {"config": (tyro.conf.AvoidSubcommands,)}
    if default is not None:
        options["default"] = default
    if {"-h", "--help"} & set(argv):
        unbreak_help(cls)
    else:
        check_flags(cls, argv, command)
    said, shown = StringIO(), Screen()
    try:
        with redirect_stderr(said), redirect_stdout(shown):
            return tyro.cli(cls, args=argv, prog=f"lockstep {command}", **options)
    except SystemExit as leaving:
        if leaving.code in (0, None):  # --help
            print(wrapped(shown.getvalue()), end="")
            raise
        raise UserError(f"{on_one_line(said.getvalue())}; see lockstep {command.split(' ')[0]} --help") from None


def unbreak_help(cls: Any) -> None:
    """Give tyro the help of every flag as one paragraph: it would keep the line breaks of the source."""
    owners: list[Any] = [owner for owner in cls.__mro__ if is_dataclass(owner)]
    for owner in owners:
        (source,) = ast.parse(dedent(inspect.getsource(owner))).body
        assert isinstance(source, ast.ClassDef)
        for statement, following in pairwise(source.body):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            name = statement.target.id
            for part in (owner.__annotations__[name], *get_args(owner.__annotations__[name])):
                if isinstance(part, type) and is_dataclass(part):
                    unbreak_help(part)
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = " ".join(str(following.value.value).split())
                owner.__annotations__[name] = Annotated[owner.__annotations__[name], tyro.conf.arg(help=text)]


class Screen(StringIO):
    """Keeps what is printed, and is otherwise like the screen: boxes and colors are drawn as they would be there."""

    def __init__(self) -> None:
        super().__init__()
        self._screen = sys.stdout

    @property
    def encoding(self) -> Any:  # type: ignore[override]
        return self._screen.encoding

    def isatty(self) -> bool:
        return self._screen.isatty()


def wrapped(text: str) -> str:
    """With what stands above the examples broken between words."""
    above, examples, rest = text.partition("For example:")
    width = shutil.get_terminal_size((100, 24)).columns
    lines = [fill(line, width, break_long_words=False, break_on_hyphens=False) for line in above.splitlines()]
    return "\n".join(lines) + "\n" + examples + rest if examples else text


def on_one_line(box: str) -> str:
    """What tyro says in a box of several lines, of which the first ones name the mistake."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts = " ".join(line if line.strip("─") else "\n" for line in lines).split("\n")
    return parts[0].strip().rstrip(".").removeprefix("Error parsing ")


def check_flags(cls: type, argv: list[str], command: str) -> None:
    """Refuse flags that a command does not have, and words that are not of a flag's type. Flags of a config's sections
    (`--train.lr`) have been checked before; what is more involved tyro finds.
    """
    known = flag_owners(cls)
    words = list(chain.from_iterable(word.split("=", 1) if word.startswith("--") else [word] for word in argv))
    for flag, word in pairwise([*words, "--"]):
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or "." in name or name in ("", "help"):
            continue
        if name in known:
            takes_a_word = get_type_hints(known[name])[name] is not bool and not re.match(r"--|-[a-z]", word)
            if takes_a_word:
                check_word(known[name], "", name, word, flag)
        else:
            refuse_unless_known(flag, [one.replace("_", "-") for one in known], command.split(" ")[0])


def flag_owners(cls: type) -> dict[str, type]:
    """The name of each flag without a dot -> the dataclass that has it: the command's own, or one that stands in it
    without a name.
    """
    found: dict[str, type] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        is_nameless = any(getattr(part, "name", None) == "" for part in getattr(hint, "__metadata__", ()))
        found |= flag_owners(get_args(hint)[0]) if is_nameless else {name: cls}
    return found


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
