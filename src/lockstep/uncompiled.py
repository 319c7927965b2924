"""Functions that torch.compile must leave alone."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """As `torch.compiler.disable`, which imports the compiler: 2 seconds of every start, of every rank, which a run
    that compiles nothing does not need. So the compiler is imported by the first that compiles.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call  # type: ignore[return-value]
