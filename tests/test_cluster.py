"""Scripts for clusters: what `lockstep launch` writes, and the ready ones in scripts/."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli import main
from lockstep.config import Config, Metrics
from lockstep.launch.adopt import port_of
from lockstep.launch.cluster import HOWS, Job, Place, script
from lockstep.results.metrics import read_metrics
from lockstep.training.metrics import MetricsWriter
from lockstep.training.sinks import Prometheus
from tests.ranks import LONG

SCRIPTS = sorted(Path("scripts").glob("*.sh"))
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
needs_shellcheck = pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (apt install shellcheck)")


def shellcheck(*words: str) -> None:
    assert SHELLCHECK is not None
    subprocess.run([SHELLCHECK, *words], check=True)


def written(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["launch", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("how", ["slurm", "torchrun", "deepspeed"])
@pytest.mark.parametrize("flags", [(), ("--nodes", "4", "--gpus", "8", "--cpus", "12", "--partition", "big")])
def test_every_script_is_one_that_bash_takes_and_shellcheck_where_it_is_here(
    how: str, flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job.sh"
    told = written(capsys, how, "configs/digits_cnn.yaml", "--master", "node1", "--out", str(out), *flags)
    subprocess.run(["bash", "-n", str(out)], check=True)
    if SHELLCHECK is not None:
        shellcheck(str(out))
    assert os.access(out, os.X_OK)
    text = out.read_text()
    assert "train configs/digits_cnn.yaml --run-dir runs/lockstep --resume auto --checkpoint.every 100" in text
    assert "the config saves nothing: a checkpoint every 100 steps was added" in told
    if how == "slurm":
        assert "#SBATCH --signal=USR1@120" in text
        assert "#SBATCH --requeue" in text
        assert ("#SBATCH --gpus-per-node=8" in text) == bool(flags)


def test_a_manifest_for_kubernetes(capsys: pytest.CaptureFixture[str]) -> None:
    said = written(capsys, "kubernetes", "configs/digits_cnn.yaml", "--nodes", "3", "--gpus", "2", "--image", "mine:1")
    manifest: Any = yaml.safe_load(said)
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert (manifest["kind"], replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == ("PyTorchJob", 1, 2)
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["image"] == "mine:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "torchrun --nnodes=3 --nproc-per-node=2" in container["command"][-1]
    assert {v["name"] for v in replicas["Master"]["template"]["spec"]["volumes"]} == {"shm", "runs"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "takes one of slurm, torchrun, kubernetes, deepspeed and a config file"),
        (["pbs", "configs/digits_cnn.yaml"], "but was given 'pbs configs/digits_cnn.yaml'"),
        (["slurm", "configs/digits_cnn.yaml", "--nodes", "0"], "--nodes is 0, but it must be 1 or more"),
        (["slurm", "configs/none.yaml"], "configs/none.yaml"),
        (["slurm", "configs/gpt_3d.yaml", "--ranks", "3"], "which 1 x 3 ranks cannot be divided by"),
        (["torchrun", "configs/digits_cnn.yaml", "--nodes", "2"], "needs --master"),
        (["slurm", "configs/digits_cnn.yaml", "--gpus", "2", "--ranks", "3"], "--ranks 3 and --gpus 2 disagree"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *argv]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_what_is_not_installed_cannot_be_submitted_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "slurm", "configs/digits_cnn.yaml", "--submit"]) == 2
    assert "--submit needs sbatch, which is not installed here" in capsys.readouterr().err


def test_a_config_that_saves_is_left_as_it_is() -> None:
    config = Config()
    config.checkpoint.every_seconds = 600.0
    for how in HOWS:
        assert "--checkpoint.every" not in script(how, Job("x.yaml", config, Place(2, 0, 2, master="node1")))


def test_two_steps_of_one_job_meet_at_different_ports() -> None:
    ports = {port_of({"SLURM_JOB_ID": job, "SLURM_STEP_ID": str(step)}) for job in ("7", "8") for step in range(8)}
    assert len(ports) == 16
    assert all(20000 <= port < 40000 for port in ports)


# ---- scripts/ --------------------------------------------------------------------------------------------------


@needs_shellcheck
@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_shellcheck_finds_nothing(file: Path) -> None:
    shellcheck("-x", str(file))


QUICK = ("--train.steps", "2", "--train.evaluate-every", "0")
SMALL_GPT = ("--model.size", "custom", "--model.d-model", "32", "--model.layers", "1")
SMALL = ("--data.name", "synthetic", "--data.samples", "64", "--model.width", "4", "--train.batch-size", "8", *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("launch_ddp.sh", ("digits_cnn", *QUICK), "strategy ddp, 2 ranks"),
        ("run_ddp_single_node.sh", SMALL, "strategy ddp, 2 ranks"),
        ("run_fsdp_single_node.sh", SMALL, "strategy fsdp, 2 ranks"),
        ("run_verification.sh", ("--strategies", "naive"), "naive"),
        ("run_benchmark.sh", (*SMALL_GPT, "--steps", "2", "--warmup", "0", "--no-baseline"), "naive"),
    ],
)
@pytest.mark.long
def test_the_ready_scripts_run(name: str, flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    script = Path("scripts") / name
    environment = {**os.environ, "RANKS": "2", "MASTER_PORT": "29611"}
    command = ["bash", str(script.absolute()), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout


# ---- where metrics go ------------------------------------------------------------------------------------------


def test_a_sink_that_fails_costs_itself_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "node_exporter"
    folder.mkdir()
    config = Config(metrics=Metrics(tensorboard=False, prometheus=str(folder / "run.prom")))
    with MetricsWriter(tmp_path, config=config) as metrics:
        metrics.write("train", 1, {"loss": 2.0})
        shutil.rmtree(folder)
        metrics.write("train", 2, {"loss": 1.0})
        metrics.write("train", 3, {"loss": 0.5})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    said = capsys.readouterr().err
    assert said.startswith("Prometheus ends at step 2 (")
    assert said.count("training goes on") == 1


def test_prometheus_reads_what_was_last(tmp_path: Path) -> None:
    config = Config()
    config.metrics.tensorboard, config.metrics.prometheus = False, str(tmp_path / "lockstep.prom")
    with MetricsWriter(tmp_path, 0, config, restarts=2) as metrics:
        metrics.write("train", 10, {"loss": 2.5, "tokens_per_s": 1e6, "mfu": 0.4, "exposed_share": 0.1, "epoch": 1})
        metrics.write("test", 10, {"loss": float("nan"), "words": "none"})
    text = (tmp_path / "lockstep.prom").read_text()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = f'{{run="{tmp_path.name}"}}'
    assert values == {
        f"lockstep_exposed_share{label}": "0.1",
        f"lockstep_loss{label}": "2.5",
        f"lockstep_mfu{label}": "0.4",
        f"lockstep_restarts{label}": "2.0",
        f"lockstep_step{label}": "10.0",
        f"lockstep_test_loss{label}": "NaN",
        f"lockstep_tokens_per_s{label}": "1000000.0",
    }
    for line in text.splitlines():
        assert line.startswith(("# HELP lockstep_", "# TYPE lockstep_", "lockstep_"))


def test_a_label_says_what_it_was_told(tmp_path: Path) -> None:
    assert '{run="a\\"b\\\\c"}' in Prometheus(tmp_path / "x.prom", 'a"b\\c', 0).text()


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_an_extra_that_is_missing_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    config = Config()
    setattr(config.metrics, package, "project")
    with pytest.raises(ValueError, match=rf"metrics\.{package} was given, but {package} is not installed: pip install"):
        MetricsWriter(tmp_path, 0, config)


class Recorder:
    """Stands for wandb and for mlflow: what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> "Recorder":
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.mark.parametrize(("package", "logs"), [("wandb", "log"), ("mlflow", "log_metrics")])
def test_records_reach_the_extras(package: str, logs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, config = Recorder(), Config()
    monkeypatch.setitem(sys.modules, package, recorder)
    config.metrics.tensorboard = False
    setattr(config.metrics, package, "project")
    with MetricsWriter(tmp_path, 0, config) as metrics:
        metrics.write("train", 3, {"loss": 1.0, "where": "a word"})
    ((_, (values,), given),) = [call for call in recorder.calls if call[0] == logs]
    assert list(values.values()) == [1.0]
    assert given == {"step": 3}
    assert recorder.calls[-1][0] in ("finish", "end_run")
