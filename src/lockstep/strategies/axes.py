"""The axes that cut the model itself, as a strategy's name has them: `zero3,tp=2`, `zero1,pp=2:1f1b,tp=2:sequence`."""

from dataclasses import replace
from typing import Any

from lockstep.config import Parallel
from lockstep.errors import UserError
from lockstep.parallel.pipeline.schedule import SCHEDULES

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "pp": {name: {"schedule": name, "chunks": 2 if name in ("interleaved", "zb-v") else 1} for name in SCHEDULES},
    "replicate": {},
    "shard": {},
    "cp": {"ring": {"attention": "ring"}, "ulysses": {"attention": "ulysses"}},
    "tp": {"sequence": {"sequence": True}, "keep_gathered": {"keep_gathered": True}},
    "ep": {"cut": {"cut_experts": True}, "halves": {"expert_halves": True}},
}
"""Axis -> the options that may follow its degree, and the fields that they set."""
MODEL_AXES = ("pp", "cp", "tp")
NATIVE, NATIVE_AXES = "native", ("pp", "cp", "tp", "ep")
"""After an axis of the model: cut by PyTorch's own means."""


def model_degrees(parallel: Parallel) -> dict[str, int]:
    return {axis: getattr(parallel, axis) for axis in MODEL_AXES}


def with_axes(parallel: Parallel, words: list[str], name: str) -> Parallel:
    """`parallel` with axes by their names: `tp=2`, `tp=2:sequence`."""
    for word in words:
        axis, _, value = word.partition("=")
        degree, *options = value.split(":")
        if axis not in OPTIONS or not degree.removeprefix("-").isdigit():
            raise UserError(f"strategy {name!r} has {word!r}, which must be an axis and its degree, as {allowed()}")
        chosen: dict[str, Any] = {axis: int(degree)}
        for option in options:
            if option == NATIVE and axis in NATIVE_AXES:
                chosen["native"] = tuple(dict.fromkeys((*parallel.native, axis)))
                continue
            if option not in OPTIONS[axis]:
                raise UserError(f"strategy {name!r} has {option!r} after {axis}; there are {allowed()}")
            chosen |= OPTIONS[axis][option]
        parallel = replace(parallel, **chosen)
    return parallel


def strategy_name(parallel: Parallel) -> str:
    """What to call it: the engine with its options, and the axes that cut the model."""
    chosen = ((parallel.algorithm, "native"), (parallel.compression, "none"))
    options = "".join(f"+{option}" for option, neutral in chosen if option != neutral)
    said = {
        "pp": f":{parallel.schedule}",
        "cp": f":{parallel.attention}" if parallel.attention != "ring" else "",
        "tp": ":sequence" * parallel.sequence + ":keep_gathered" * parallel.keep_gathered,
        "ep": ":cut" * parallel.cut_experts + ":halves" * parallel.expert_halves,
    }
    degrees = {**model_degrees(parallel), "ep": parallel.ep}
    degrees = {axis: degree for axis, degree in degrees.items() if degree > 1}
    by = {axis: f":{NATIVE}" if axis in parallel.native else "" for axis in degrees}
    axes = "".join(f",{axis}={degree}{said[axis]}{by[axis]}" for axis, degree in degrees.items())
    return f"{parallel.data}{options}{axes}"


def allowed() -> str:
    listed = {axis: [*options, *([NATIVE] if axis in NATIVE_AXES else [])] for axis, options in OPTIONS.items()}
    return ", ".join(f"{axis}=2{''.join(f'[:{option}]' for option in options)}" for axis, options in listed.items())
