"""What a user has written, by where it stands: `my_package.nets:Net`. Nothing of this package is edited for it."""

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import UserError


def is_import(name: str) -> bool:
    """`package.module:object`, and not one of the names that there are."""
    return ":" in name


def shown_name(section: Any) -> str:
    """Of a config's model or data: its name, or that of what the user has given, as it may stand in a file's name."""
    own = section.name == "own" and section.import_ is not None
    return re.sub(r"[^\w.]", "_", section.import_.rpartition(":")[2]) if own else str(section.name)


def imported(path: str, key: str) -> Any:
    """The object that a config's `key` names. The current folder can be imported from."""
    module_name, _, object_name = path.partition(":")
    if not module_name or not object_name:
        raise UserError(f"{key} is {path!r}, but it must be package.module:object, as in my_package.nets:Net")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise UserError(f"{key} {path}: there is no module {error.name}, neither installed nor in {here}") from None
        raise UserError(f"{key} {path}: {module_name} imports {error.name}, which is not installed") from None
    except Exception as error:
        raise UserError(f"{key} {path}: {module_name} cannot be imported: {where_and_what(error)}") from error
    for part in object_name.split("."):
        if not hasattr(found, part):
            there = ", ".join(n for n, value in vars(found).items() if callable(value) and not n.startswith("_"))[:200]
            raise UserError(f"{key} {path}: {module_name} has no {object_name}; it has {there or 'nothing to call'}")
        found = getattr(found, part)
    return found


def called(path: str, key: str, args: dict[str, Any], *given: Any) -> Any:
    """What the object gives when it is called with the config's arguments."""
    make = imported(path, key)
    if not callable(make):
        raise UserError(f"{key} {path} is a {type(make).__name__}, and must be a class or a function")
    try:
        inspect.signature(make).bind(*given, **args)
    except TypeError as error:
        said = f" {args}" if args else ""
        raise UserError(f"{key} {path} does not take the arguments{said}: {error}") from None
    except ValueError:  # what C has built does not say what it takes
        pass
    return make(*given, **args)


def only_taken(make: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Of what is offered, what the function has a parameter for."""
    parameters = inspect.signature(make).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    names = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
    return {name: value for name, value in offered.items() if name in names}


def where_and_what(error: BaseException) -> str:
    """Of an error in a user's own code, on one line, with the last line of theirs that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    others = ("importlib", "site-packages", str(Path(__file__).parent.parent))
    own = [frame for frame in frames if not any(part in frame.filename for part in others)]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}"
