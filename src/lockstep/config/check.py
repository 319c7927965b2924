"""Whether values have the types and limits that `schema.py` states (pydantic checks them), and what it cannot say."""

from functools import cache
from math import inf
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from annotated_types import Interval
from pydantic import TypeAdapter, ValidationError

from lockstep.config.schema import Config, Train
from lockstep.config.user_code import is_import
from lockstep.errors import UserError

OUT_OF_RANGE = ("greater_than_equal", "less_than_equal")
"""What pydantic calls a number beyond its limits."""


def check_ranges(config: Config) -> None:
    """Refuse values that no run can use, naming the key and what is allowed."""
    for section, given in vars(config).items():
        for field, value in vars(given).items():
            checked(type(given), section, field, value)
            if isinstance(value, str) and "\0" in value:
                raise UserError(f"{section}.{field} has a NUL character in it, which no name may have")
    check_names(config)
    for degree in ("replicate", "shard"):
        if getattr(config.parallel, degree) == 0:
            raise UserError(f"parallel.{degree} is 0, but it must be 1 or more, or -1 for the rest of the ranks")


def checked(cls: type, section: str, field: str, value: Any, said: str | None = None) -> Any:
    """`value` as the field's type has it (a list is a tuple, an int a good float), or one line that says what is wrong.
    `said`: how the user has called the key, if not as a config does.
    """
    hint, adapter = _hint_and_adapter(cls, field)
    value = _plain(value, hint)
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        beyond = [e["input"] for e in error.errors() if e["type"] in OUT_OF_RANGE]
        allowed = _range(beyond[0], _limits(hint)) if beyond else type_name(get_type_hints(cls)[field])
    text = _shortly(value) if beyond else _shortly(repr(value))
    raise UserError(f"{said or f'{section}.{field}'} is {text}, but it must be {allowed}")


def check_word(cls: type, section: str, field: str, word: str, flag: str) -> None:
    """A flag's one value, before it is converted."""
    hint, _ = _hint_and_adapter(cls, field)
    if "tuple" in str(hint) or (word == "None" and type(None) in get_args(hint)):
        return
    try:
        checked(cls, section, field, word, flag)
    except UserError as mistake:
        try:
            value = yaml.safe_load(word)
        except (yaml.YAMLError, ValueError):
            raise mistake from None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise
        try:
            type(value)(word)  # as tyro will read it
            checked(cls, section, field, value)
        except UserError as other:
            is_range = " must be from " in str(other) or " or more" in str(other)
            raise (other if is_range else mistake) from None
        except ValueError:
            raise mistake from None


@cache
def _hint_and_adapter(cls: type, field: str) -> tuple[Any, TypeAdapter[Any]]:
    hint = get_type_hints(cls, include_extras=True)[field]
    return hint, TypeAdapter(hint)


def _plain(value: Any, hint: Any) -> Any:
    """As YAML means it: a list is a tuple, and `1e-3`, which YAML 1.1 reads as a string, a number."""
    if isinstance(value, list | tuple):
        return tuple(_plain(one, hint) for one in value)
    if isinstance(value, str) and "float" in str(hint):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _limits(hint: Any) -> tuple[float, float]:
    """Of the numbers in a type."""
    for part in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        if isinstance(part, Interval):
            return float(str(part.ge)), float(str(part.le))
        if get_args(part) and (found := _limits(part)) != (-inf, inf):
            return found
    return -inf, inf


def _range(number: float, limits: tuple[float, float]) -> str:
    """In words; an upper limit that only catches slips is left out where the number is below the lower one."""
    low, high = limits
    if number < low and high >= 10_000_000:
        return f"{low:g} or more"
    return f"from {low:g} to {high:,.0f}" if high >= 1000 else f"from {low:g} to {high:g}"


def type_name(type_: Any) -> str:
    """As a config file would put it: null for None, a list for a tuple."""
    inner = [part for part in get_args(type_) if part is not Ellipsis]
    origin = get_origin(type_)
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (Union, UnionType):
        names = [type_name(part) for part in sorted(inner, key=lambda part: part is type(None))]
        return f"{names[0]}, null" if names[0].startswith("one of") and names[1:] == ["null"] else " or ".join(names)
    if origin is tuple:
        one = type_name(inner[0])
        return f"a list of {one.removeprefix('a ')}s" if one.startswith("a ") else f"a list of {one}"
    return WORDS.get(origin or type_, getattr(type_, "__name__", str(type_)))


WORDS = {
    type(None): "null",
    dict: "a section of keys",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


def _shortly(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


LOW_BITS = {"adamw_8bit": 8, "adamw_bf16": 16}
"""Optimizers whose state has fewer bits than fp32."""
OPTIMIZERS = ("sgd", "adam", "adamw", *LOW_BITS, "muon", "schedule_free")
SCHEDULES = ("constant", "cosine", "step")


def check_names(config: Config) -> None:
    """What is one of some names, or stands in a module of the user's."""
    check_choices(config.train)
    for section, own in (("model", config.model), ("data", config.data)):
        if own.name == "own" and own.import_ is None:
            raise UserError(f"{section}.name own needs {section}.import, as my_package.module:object")


def check_clipping_and_averages(train: Train) -> None:
    if train.clip_norm is not None and train.clip_value is not None:
        raise UserError(
            f"train.clip_norm {train.clip_norm:g} and train.clip_value {train.clip_value:g} both say how gradients are "
            f"clipped; leave one out"
        )
    if train.optimizer == "schedule_free" and train.ema is not None:
        raise UserError("train.optimizer schedule_free averages its weights already; leave train.ema out")
    if train.optimizer == "schedule_free" and train.schedule != "constant":
        raise UserError(
            f"train.optimizer schedule_free takes the place of a schedule, and train.schedule is {train.schedule}; "
            f"give --train.schedule constant"
        )
    if train.optimizer == "schedule_free" and not train.betas[0]:
        raise UserError("train.betas begins with 0, and schedule_free averages by it; it must be more than 0")


def check_choices(train: Train) -> None:
    for key, value, names in (
        ("train.optimizer", train.optimizer, OPTIMIZERS),
        ("train.schedule", train.schedule, SCHEDULES),
    ):
        if value not in names and not is_import(value):
            raise UserError(f"{key} is {value!r}, but it must be one of {', '.join(names)}, or package.module:object")
    check_clipping_and_averages(train)
    for callback in train.callbacks:
        if not is_import(callback):
            raise UserError(f"train.callbacks has {callback!r}, but each must be package.module:function")
    if train.loss is not None and not is_import(train.loss):
        raise UserError(f"train.loss is {train.loss!r}, but it must be package.module:function")
