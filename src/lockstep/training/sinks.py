"""Where records go besides metrics.jsonl: each place behind the same two methods."""

import threading
import traceback
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.results.whole import write_whole


class Sink(Protocol):
    """A place that records go to, on the first rank."""

    def write(self, kind: str, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def sinks(config: Config, folder: Path, purge: int | None, restarts: int) -> list[Sink]:
    """Those that the config asks for. `purge`: steps from there on are taken again."""
    asked, found = config.metrics, list[Sink]()
    if asked.tensorboard:
        found.append(TensorBoard(folder, purge))
    if asked.prometheus is not None:
        found.append(Prometheus(Path(asked.prometheus), folder.name, restarts))
    if asked.wandb is not None:
        found.append(WeightsAndBiases(asked.wandb, config, folder))
    if asked.mlflow is not None:
        found.append(MLflow(asked.mlflow, config, folder))
    return found


class TensorBoard:
    """Metrics as TensorBoard's event files."""

    def __init__(self, folder: Path, purge: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and rank 0's alone

        self._excepthook = threading.excepthook
        threading.excepthook = self._silent_about_events
        self._board = SummaryWriter(str(folder), purge_step=purge)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._board.close()
        threading.excepthook = self._excepthook

    def _silent_about_events(self, failed: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread. What ends it is printed as one line when the next record is written."""
        innermost = list(traceback.walk_tb(failed.exc_traceback))[-1:]
        if not any("tensorboard" in frame.f_code.co_filename for frame, _ in innermost):
            self._excepthook(failed)


HELP = {
    "step": "The last step that was logged.",
    "restarts": "How often the ranks have been started anew.",
    "loss": "Mean training loss since the record before.",
    "test_loss": "Of the last evaluation.",
    "samples_per_s": "Samples of the global batch per second.",
    "tokens_per_s": "Tokens of the global batch per second.",
    "mfu": "Matrix products of the model, as a share of the peak.",
    "exposed_share": "Share of the time that a step waited for communication.",
    "grad_norm": "Norm of the gradient.",
    "memory_bytes": "Of the first rank, at most.",
}


class Prometheus:
    """One text file, replaced as a whole: node_exporter may read it at any moment."""

    def __init__(self, file: Path, run: str, restarts: int) -> None:
        self._file, self._label = file, escaped(run)
        self._values: dict[str, float] = {"restarts": restarts}
        if not file.absolute().parent.is_dir():
            raise UserError(f"metrics.prometheus {file}: there is no folder {file.absolute().parent}; make it first")

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        prefix = "" if kind == "train" else f"{kind}_"
        known = {f"{prefix}{name}": value for name, value in values.items() if f"{prefix}{name}" in HELP}
        self._values |= {**known, "step": step}
        write_whole(self._file, self.text())

    def text(self) -> str:
        lines = []
        for name, value in sorted(self._values.items()):
            shown = repr(float(value)) if isfinite(value) else "NaN"
            lines += [
                f"# HELP lockstep_{name} {HELP[name]}",
                f"# TYPE lockstep_{name} gauge",
                f'lockstep_{name}{{run="{self._label}"}} {shown}',
            ]
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """The last values stay: the run has reached them."""


def escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class WeightsAndBiases:
    """Metrics to Weights & Biases."""

    def __init__(self, project: str, config: Config, folder: Path) -> None:
        wandb = imported("wandb", "metrics.wandb")
        # The run's own name, so that a run that goes on goes on there as well.
        given = {"project": project, "name": folder.name, "id": run_id(folder), "resume": "allow", "dir": str(folder)}
        self._run = wandb.init(**given, config=asdict(config))

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Metrics to MLflow."""

    def __init__(self, experiment: str, config: Config, folder: Path) -> None:
        self._mlflow = imported("mlflow", "metrics.mlflow")
        self._mlflow.set_experiment(experiment)
        self._mlflow.start_run(run_name=folder.name)
        flat = {f"{s}.{k}": v for s, section in asdict(config).items() for k, v in section.items()}
        self._mlflow.log_params({name: str(value)[:250] for name, value in flat.items()})

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics({f"{kind}.{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def run_id(folder: Path) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in folder.name)[-64:]


def imported(package: str, key: str) -> Any:
    """An optional extra: rank 0 alone has use for it."""
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f'{key} was given, but {package} is not installed: pip install -e ".[{package}]"') from None
