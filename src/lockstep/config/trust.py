"""A run's folder may come from a stranger, and its config.yaml may name code: `data: {import: os:system, args: ...}`.

Nothing that stands there is imported unless the user names the same import on this command line, or says --trust.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.models import Own
from lockstep.config.schema import Config
from lockstep.config.user_code import is_import
from lockstep.errors import UserError

SIGNS = ("checkpoints", "metrics.jsonl", "status.json", "run.json", "model.safetensors", ".lock")
"""What lies beside the config.yaml of a run."""


@dataclass
class Consent:
    """What the user allows a command to do with a folder that may be a stranger's."""

    named: tuple[str, ...] = ()
    """Imports of the command line."""
    trust: bool = False
    """Run whatever code the run's config names."""
    older: bool = False
    """Take an older checkpoint where the newest is damaged."""


def is_of_a_run(file: Path) -> bool:
    """A config that a run has written, not one that a user keeps."""
    return file.name == "config.yaml" and any((file.parent / name).exists() for name in SIGNS)


def imports_of(config: Config) -> dict[str, str]:
    """{key: package.module:object} of all code that the config names."""
    train = config.train
    found = {"model.import": config.model.import_} if isinstance(config.model, Own) else {}
    found |= {"data.import": config.data.import_, "train.loss": train.loss}
    found |= {"train.optimizer": train.optimizer, "train.schedule": train.schedule}
    found |= {f"train.callbacks ({number})": path for number, path in enumerate(train.callbacks or (), 1)}
    return {key: path for key, path in found.items() if path is not None and is_import(path)}


def check_trusted(
    config: Config, where: Path, named: Iterable[str] = (), trust: bool = False, only: Collection[str] | None = None
) -> None:
    """Refuse what `where` would have us run. `named`: imports of this command line. `only`: keys that would be used."""
    if trust:
        return
    allowed = set(named)
    for key, path in imports_of(config).items():
        if path not in allowed and (only is None or key in only):
            flag = key.partition(" ")[0]
            raise UserError(
                f"{where} has {key} {path}, which would run code; if it is yours, name it here as well "
                f"(--{flag} {path}), or say --trust"
            )
