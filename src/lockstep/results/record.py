"""A result as a file: what was measured, with what ran where. `lockstep report` reads any set of them."""

import dataclasses
import json
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.results.environment import command_line, environment, now
from lockstep.results.whole import write_whole
from lockstep.strange import json_of

FORMAT = 1


@dataclass
class Record:
    """One command's result."""

    kind: str
    """The command: train, demo, bench train, bench comm, bench scaling, profile."""
    result: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    command: str = field(default_factory=command_line)
    when: str = field(default_factory=now)
    environment: dict[str, Any] = field(default_factory=environment)
    title: str = ""

    def write(self, file: Path) -> None:
        text = json.dumps({"lockstep_record": FORMAT, **plain(asdict(self))}, indent=1)
        write_whole(file, text + "\n")


def read_record(file: Path) -> Record:
    """The record in `file`; a clear refusal if it is something else."""
    try:
        values = json_of(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error})") from None
    if not isinstance(values, dict) or "lockstep_record" not in values:
        raise UserError(f"{file} is not a result of lockstep's; those are written by --json, train and demo")
    if values.pop("lockstep_record") != FORMAT:
        raise UserError(f"{file} was written by another version of lockstep; run its command again")
    if not isinstance(values.get("kind"), str) or not isinstance(values.get("result"), dict):
        raise UserError(f"{file} is not a whole result of lockstep's; run its command again")
    names = {f.name for f in dataclasses.fields(Record)}
    return Record(**{name: value for name, value in values.items() if name in names})


def plain(value: Any) -> Any:
    """What JSON knows: numbers that are not finite become null, tuples lists, dataclasses objects."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
