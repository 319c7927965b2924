"""The result of a run."""

from dataclasses import dataclass, field
from pathlib import Path

from lockstep.training.window import Spent


@dataclass
class TrainResult:
    """Of `lockstep train`, on one rank."""

    steps: int
    """Reached: those of the runs that this one goes on from included."""
    total_steps: int
    """That the config asks for."""
    loss: float
    """Mean over the last logged steps."""
    test_loss: float
    test_accuracy: float
    seconds: float
    losses: list[float] = field(default_factory=list)
    """Of each logged step."""
    is_main: bool = True
    """Whether this is rank 0's result."""
    stopped: bool = False
    """Before the last step, by SIGTERM or Ctrl-C."""
    stopped_by: str = ""
    """The signal's name."""
    not_saved: str | None = None
    """Why the last checkpoint, which the run should leave behind, is not there."""
    saved_at: int = -1
    """The step of the last checkpoint that it has left; -1: none."""
    folder: Path | None = None
    resumed_at: int = 0
    """The step that it went on from."""
    spent: Spent = field(default_factory=Spent)
    rate: str = ""
    """Mean throughput, without evaluation and saving."""
    best: tuple[float, int] | None = None
    """The lowest test loss, and after which step."""
    memory: int = 0
    """Bytes, at most, of this rank."""
    gave_up: bool = False
    """`train.patience` evaluations in a row have found nothing better."""
