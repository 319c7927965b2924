"""Everything that a prediction depends on."""

from dataclasses import dataclass, field

from lockstep.plan.constants import Constants, fitted
from lockstep.plan.layout import PlanLayout
from lockstep.plan.machine import Machine
from lockstep.plan.network import Network
from lockstep.plan.software import OURS, Software


@dataclass(frozen=True)
class Setting:
    """What runs, divided how, where, with which software."""

    network: Network
    layout: PlanLayout
    machine: Machine
    software: Software = OURS
    precision: str = "bf16"
    """Of the products in the layers; head and attention compute in bf16 where this is narrower."""
    constants: Constants = field(default_factory=fitted)

    @property
    def wide(self) -> str:
        return "bf16" if self.precision in ("fp4", "fp8") else self.precision

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return {"fp32": 4, "tf32": 4, "fp64": 8}.get(self.precision, 2)

    @property
    def beside(self) -> int:
        """Ranks that share what tensor parallelism does not cut: those of tp, where it is cut along the sequence."""
        return self.layout.tp if self.layout.sequence and self.software.sequence else 1


def with_factors(setting: Setting) -> Constants:
    """The constants as they are on this machine: what calibrate and learn have found."""
    return setting.constants.scaled(setting.machine.factors)
