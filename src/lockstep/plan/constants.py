"""The free constants of the planner: each with its value, what it stands for, and where it comes from.

They were fitted to published results (docs/planning.md says how, and what error is left). Nothing else in this folder
is fitted: shapes, bytes and schedules are counted, peaks and links stand in `machines/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml


@dataclass(frozen=True)
class Constants:
    """The numbers that were fitted to published results, by name."""

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def factor(self, name: str | None) -> float:
        """Of software that has results of its own; 1 for others."""
        return 1.0 if name is None else self.values.get(f"factor_{name}", 1.0)

    def scaled(self, factors: Mapping[str, float]) -> "Constants":
        """As they are on a machine that these were found on; other constants come from their sources."""
        return self.changed(**{name: self[name] * f for name, f in factors.items() if name in self.values})

    def changed(self, **values: float) -> "Constants":
        return Constants({**self.values, **values})


@cache
def fitted() -> Constants:
    return Constants({name: float(entry["value"]) for name, entry in entries().items()})


@cache
def entries() -> dict[str, dict[str, Any]]:
    """Name -> value, unit and meaning."""
    text = (resources.files("lockstep.plan") / "constants.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found
