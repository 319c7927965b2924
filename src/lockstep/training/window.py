"""What a run logs of its steps: means over a window of them, and over all."""

import resource
import sys
from dataclasses import dataclass, field

import torch

from lockstep.comm.ledger import Mark, seconds_between

PHASES = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms", "exposed_ms")


@dataclass
class Window:
    """Steps that are logged together: since the last line."""

    start: Mark
    steps: int = 0
    samples: int = 0
    away: float = 0.0
    """Seconds of it in which nothing was trained: evaluation, saving."""
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, samples: int, values: dict[str, float]) -> None:
        self.steps += 1
        self.samples += samples
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        return {name: total / self.steps for name, total in self.sums.items()}

    def samples_per_second(self, end: Mark) -> float:
        return self.samples / self.seconds(end)

    def exposed_share(self, end: Mark) -> float:
        return self.sums.get("exposed_ms", 0.0) / 1e3 / self.seconds(end)

    def seconds(self, end: Mark) -> float:
        """By the device's clock: the host looks at a step later, and not always equally late."""
        return max(seconds_between(self.start, end) - self.away, 1e-9)


@dataclass
class Spent:
    """Where the time of a whole run went, in seconds."""

    steps: int = 0
    samples: int = 0
    training: float = 0.0
    """In windows of steps: neither evaluation nor saving."""
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    evaluation: float = 0.0
    saving: float = 0.0
    """That training stood still for."""
    compiling: float = 0.0
    """In the steps."""

    def add(self, window: Window, end: Mark) -> None:
        self.steps += window.steps
        self.samples += window.samples
        self.training += window.seconds(end)
        for name in PHASES:
            self.phases[name] += window.sums.get(name, 0.0) / 1e3

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.training if self.training else 0.0

    def split(self) -> dict[str, float]:
        """What of the run: computation, communication that was waited for, the rest."""
        seconds = self.phases
        phases = seconds["forward_ms"] + seconds["backward_ms"] + seconds["optimizer_ms"]
        known = phases + seconds["exposed_ms"] + seconds["data_ms"]
        compiling = min(self.compiling, phases)
        return {
            "compute": phases - compiling,
            "compiling": compiling,
            "communication": seconds["exposed_ms"],
            "data": seconds["data_ms"],
            "evaluation": self.evaluation,
            "saving": self.saving,
            "other": max(0.0, self.training - known),
        }


def peak_memory(device: torch.device) -> int:
    """Bytes: of this rank's tensors on a GPU, of this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
