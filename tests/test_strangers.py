"""A checkpoint made by a stranger: nothing in it is run, nothing leads out of its folder, what is malformed is one
line."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lockstep.checkpoint import manifest
from lockstep.checkpoint.checkpoints import CHECKPOINTS, Checkpoints, random_state
from lockstep.checkpoint.storage import RestrictedUnpickler, read_metadata
from lockstep.cli import main
from lockstep.errors import UserError
from lockstep.layout.world import World

TRAIN = [
    *("train", "--model.name", "mlp", "--model.layers", "2", "--model.width", "4"),
    *("--data.name", "synthetic", "--data.kind", "regression", "--data.shape", "4", "--data.classes", "2"),
    *("--train.steps", "2", "--checkpoint.every", "1", "--train.lr", "0.01"),
]


class Bomb:
    """Leaves a file behind if anybody unpickles it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    assert main([*TRAIN, "--run-dir", str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def newest(run: Path) -> Path:
    return sorted((run / CHECKPOINTS).glob("step-*"))[-1]


def seal(folder: Path) -> None:
    """Make the checksums right again, as any stranger can."""
    files = [f for f in folder.iterdir() if f.name != manifest.MANIFEST]
    manifest.write_manifest(folder, manifest.describe(files))


def booby_trapped_metadata(folder: Path, trace: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(trace)))


def booby_trapped_entry(folder: Path, trace: Path) -> None:
    """The random state is a pickle that runs."""
    state = {"rng.0": Bomb(trace), "own.0": Bomb(trace), "model.x": torch.zeros(1)}
    for file in folder.glob("*.distcp"):
        file.unlink()
    dcp.save(state, storage_writer=FileSystemWriter(folder), planner=DefaultSavePlanner(False), no_dist=True)


def keeps_model(folder: Path, trace: Path) -> None:
    """Everything as it was, but a random state that runs."""
    from lockstep.checkpoint.storage import saved_names

    names = saved_names(folder)
    state: dict[str, Any] = {name: torch.zeros(()) for name in names if name.startswith(("model.", "optimizer."))}
    metadata = read_metadata(folder).state_dict_metadata
    for name in state:
        state[name] = torch.zeros(metadata[name].size)
    state |= {"rng.0": Bomb(trace), "own.0": {}}
    for file in folder.glob("*.distcp"):
        file.unlink()
    dcp.save(state, storage_writer=FileSystemWriter(folder), planner=DefaultSavePlanner(False), no_dist=True)


@pytest.mark.parametrize("trap", [booby_trapped_metadata, booby_trapped_entry, keeps_model])
@pytest.mark.parametrize("command", ["resume", "export", "generate"])
def test_no_pickle_of_a_stranger_is_run(
    run: Path, tmp_path: Path, trap: Callable[[Path, Path], None], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "it ran"
    trap(newest(run), trace)
    seal(newest(run))
    words = {
        "resume": [*TRAIN, "--train.steps", "4", "--run-dir", str(tmp_path / "new"), "--resume", str(newest(run))],
        "export": ["export", str(newest(run)), "--out", str(tmp_path / "weights.safetensors")],
        "generate": ["generate", str(newest(run))],
    }[command]
    status = main(words)
    said = capsys.readouterr().err
    assert not trace.exists()
    if (command, trap) == ("export", keeps_model):
        return  # what it reads of this one is tensors only
    assert status in (1, 2)
    assert said.count("error: ") == 1
    assert "Traceback" not in said


def files_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / manifest.MANIFEST).read_text())
    return found


def rewrite(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / manifest.MANIFEST).write_text(json.dumps({**files_of(folder), **changes}))

    return apply


def listing(name: str) -> Callable[[Path], None]:
    """The manifest lists one more file, which is really there."""

    def apply(folder: Path) -> None:
        files = files_of(folder)["files"]
        target = folder / name
        files[name] = manifest.describe([target])[target.name]
        rewrite(files=files)(folder)

    return apply


def linked(folder: Path) -> None:
    """A file of the checkpoint is somebody else's."""
    (folder / "run.json").rename(folder.parent / "elsewhere.json")
    (folder / "run.json").symlink_to(folder.parent / "elsewhere.json")
    files = files_of(folder)["files"]
    rewrite(files=files)(folder)


def run_json(text: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / "run.json").write_text(text)
        seal(folder)

    return apply


MALFORMED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no files": (rewrite(files={}), "does not list .metadata"),
    "files is a list": (rewrite(files=[1, 2]), "it has no list of files"),
    "an entry is a number": (rewrite(files={"run.json": 3}), "run.json has no size and checksum"),
    "a size is a text": (rewrite(files={"run.json": {"bytes": "1", "sha256": ""}}), "no size and checksum"),
    "leads out": (listing("../latest"), "is not a file of its folder"),
    "absolute": (rewrite(files={"/etc/passwd": {"bytes": 1, "sha256": ""}}), "is not a file of its folder"),
    "a link": (linked, "is missing, or no file"),
    "not an object": (lambda f: (f / manifest.MANIFEST).write_text("[]") and None, "holds no object"),
    "nested": (lambda f: (f / manifest.MANIFEST).write_text("[" * 100_000) and None, "not valid JSON"),
    "no step": (run_json('{"ranks": 1}'), "run.json is damaged: step is None"),
    "a step that is none": (run_json('{"step": -3, "ranks": 1}'), "run.json is damaged: step is -3"),
    "ranks are a text": (run_json('{"step": 3, "ranks": "one"}'), "run.json is damaged: ranks is 'one'"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_malformed_is_one_line(
    run: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, words = MALFORMED[what]
    folder = newest(run)
    harm(folder)
    assert main([*TRAIN, "--train.steps", "4", "--run-dir", str(tmp_path / "new"), "--resume", str(folder)]) == 2
    output = capsys.readouterr()
    said = output.out.replace("\n", " ") + output.err
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "new").exists()  # nothing was begun


def test_latest_leads_to_no_other_folder(run: Path) -> None:
    (run / CHECKPOINTS / "latest").write_text("../../elsewhere")
    found, _ = Checkpoints(World(), run / CHECKPOINTS).find()
    assert found == newest(run)


def test_metadata_points_into_its_own_files(run: Path) -> None:
    folder = newest(run)
    metadata = read_metadata(folder)
    key = next(iter(metadata.storage_data))
    for change, words in (
        ({"relative_path": "../x"}, "which the manifest does not list"),
        ({"offset": 10**9}, "beyond the end"),
    ):
        place = metadata.storage_data[key]
        before = {name: getattr(place, name) for name in change}
        for name, value in change.items():
            setattr(place, name, value)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(UserError, match=words):
            read_metadata(folder)
        for name, value in before.items():
            setattr(place, name, value)


def test_the_unpickler_knows_the_format_and_nothing_else() -> None:
    for innocent in ({"a": (1, 2)}, torch.Size((2, 3)), torch.float32):
        assert RestrictedUnpickler(io.BytesIO(pickle.dumps(innocent))).load() == innocent
    sets_an_attribute = b"\x80\x02cpathlib\nPosixPath\nN}X\x06\0\0\0renamecpathlib\nPosixPath\ns\x86b."
    with pytest.raises(pickle.UnpicklingError, match="changes a class"):
        RestrictedUnpickler(io.BytesIO(sets_an_attribute)).load()
    for evil in (os.system, eval, pickle.loads, torch.load, torch.hub.load):
        with pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
            RestrictedUnpickler(io.BytesIO(pickle.dumps(evil))).load()


def test_the_random_state_survives(tmp_path: Path) -> None:
    """It is a nest of plain values, and comes back the same through the restricted way."""
    state = random_state(torch.device("cpu"))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    back = torch.load(buffer, weights_only=True)
    assert torch.equal(back["torch"], state["torch"])
    assert tuple(back["python"][1]) == state["python"][1]


def test_an_io_error_is_not_the_models_fault(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And --debug shows what caused a line."""
    import lockstep.checkpoint.storage as storage

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error", str(newest(run)))

    words = [*TRAIN, "--train.steps", "4", "--run-dir", str(run), "--resume", "auto"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.SafeReader, "read_data", broken)
        assert main(words) == 1
        said = capsys.readouterr().err
        assert "Input/output error" in said
        assert "does not fit" not in said
        assert "Traceback" not in said
        assert main([*words, "--debug"]) == 1
        said = capsys.readouterr().err
        assert "Traceback" in said
        assert "read_data" in said
    os.environ.pop("LOCKSTEP_DEBUG", None)


# ---- code that a stranger's config names ---------------------------------------------------------------------------


def os_system(run: Path, trace: Path) -> str:
    """In a run's config.yaml: what would be run if its data were built."""
    text = (run / "config.yaml").read_text()
    config = yaml.safe_load(text)
    config["data"] |= {"name": "own", "import": "os:system", "args": {"command": f"touch {trace}"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return "os:system"


def test_no_code_that_a_runs_config_names_is_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A built-in model is exported without its data; what needs the import says how to allow it."""
    trace = tmp_path / "trace"
    os_system(run, trace)
    assert main(["export", str(run), "--out", str(tmp_path / "out.safetensors")]) == 0
    (run / "data.json").unlink()  # a run that does not say what its samples look like
    for command in (["export", str(run)], ["generate", str(run)], ["train", str(run / "config.yaml")]):
        assert main(command) == 2
        assert "data.import os:system, which would run code" in capsys.readouterr().err
    assert main(["train", str(run / "config.yaml"), "--resume", str(run)]) == 2
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert main(["doctor", str(run)]) in (0, 1)
    assert not trace.exists()
    capsys.readouterr()
    assert main(["export", str(run), "--trust"]) == 2  # it was run, and gave no data
    assert trace.exists()


@pytest.mark.parametrize("key", ["loss", "optimizer", "schedule", "callbacks"])
def test_a_runs_config_is_no_way_to_code_of_any_kind(key: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["train"][key] = ["os:getcwd"] if key == "callbacks" else "os:getcwd"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(run / "config.yaml"), "--resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"train.{key}" in said
    assert "os:getcwd, which would run code" in said


def test_what_is_named_on_the_command_line_is_the_users(tmp_path: Path) -> None:
    flags = ["--model.import", "tests.own_code:Net", "--data.import", "tests.own_code:tensors"]
    run = str(tmp_path / "run")
    assert main(["train", *flags, "--train.steps", "2", "--checkpoint.every", "2", "--run-dir", run]) == 0
    assert main(["export", run]) == 2
    assert main(["export", run, "--model.import", "tests.own_code:Net"]) == 0
    assert main(["export", run, "--trust"]) == 0
    more = ["--train.steps", "3", "--resume", run]
    assert main(["train", f"{run}/config.yaml", *more]) == 2
    assert main(["train", f"{run}/config.yaml", *more, *flags]) == 0
    assert main(["train", f"{run}/config.yaml", "--train.steps", "4", "--resume", run, "--trust"]) == 0


def test_a_damaged_newest_checkpoint_is_said_and_the_older_taken_only_when_asked(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next(newest(run).glob("*.distcp")).write_bytes(b"")
    assert main(["export", str(run)]) == 2
    said = capsys.readouterr().err
    assert "step-00000002" in said
    assert "the newest whole one is" in said
    assert "step-00000001: name it, or take it by --older" in said
    assert main(["export", str(run), "--older"]) == 0
    assert main(["export", str(sorted((run / CHECKPOINTS).glob("step-*"))[0])]) == 0


@pytest.mark.parametrize("text", ["[]", "{}", '{"kind": "x", "shape": [1], "classes": 2}', "[" * 10000, '{"kind": 1}'])
def test_odd_descriptions_of_the_samples_are_passed_over(text: str, run: Path) -> None:
    (run / "data.json").write_text(text)
    assert main(["export", str(run)]) == 0
