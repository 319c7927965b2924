"""Names of a package that are imported when they are first used, so that what needs no torch does not wait for it."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for the package. `homes`: name -> the module that it is imported from."""

    def __getattr__(name: str) -> Any:  # noqa: N807 (Python's name)
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
