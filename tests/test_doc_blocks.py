"""Every shell block of the pages runs, shortened, or stands here with a reason; all other code is included."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from lockstep.cli import main
from tests.ranks import LONG

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REASONS = {  # how a command begins -> why no test of these pages runs it
    "make ": "it is what runs the tests, or installs",
    "nsys ": "needs Nsight Systems and a GPU; the ranges were seen on an H200",
    "srun ": "needs Slurm: tests/test_slurm.py runs it where there is one",
    "deepspeed ": "needs four GPUs; tests/test_launch.py starts DeepSpeed's launcher",
    "torchrun --nnodes=2": "needs two nodes; tests/test_cluster.py has two",
    "lockstep verify --share-gpu": "needs a GPU: tests/test_gpu.py",
    "lockstep train configs/gpt2_small.yaml": "needs a GPU; docs/results/h200 has it",
    "lockstep train configs/gpt_tp.yaml": "tests/test_hybrids.py trains it",
    "lockstep train configs/gpt_pp.yaml": "the same",
    "lockstep train configs/gpt_long_context.yaml": "the same",
    "lockstep train configs/gpt_3d.yaml": "the same",
    "lockstep verify --world-size 4": "the proofs of the slow tier have these layouts",
    "lockstep train --data.name mnist": "needs data that a test must not download",
    "lockstep verify --model.name hf": "my-llama is the reader's; tests/test_hf.py makes one",
    "lockstep train --model.name hf": "the same",
    "lockstep plan --hf": "config.json is the reader's; tests/test_plan_models.py reads such files",
    "lockstep plan my_package": "my_package is the reader's; tests/test_plan_models.py traces such a module",
    "lockstep plan configs/gpt_text.yaml --cluster here": "needs calibrate; tests/test_plan_commands.py does both",
    "lockstep learn": "tests/test_learn.py goes through it",
    "cd ": "no command of ours",
}
SHORTER = {
    "train": [
        *("--train.steps", "2", "--train.evaluate-every", "0", "--train.evaluate-batches", "1"),
        *("--checkpoint.every", "1"),
    ],
    "profile": ["--steps", "1", "--warmup", "1"],
    "verify": ["--steps", "2"],
    "bench train": ["--steps", "2", "--warmup", "1"],
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.S | re.M)


def lines_of(page: Path) -> list[str]:
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = [re.sub(r"\s#\s.*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def reason(line: str) -> str | None:
    return next((why for start, why in REASONS.items() if line.startswith(start)), None)


def run(line: str, folder: Path) -> None:
    """`lockstep` in this process, whose ranks are forks; torchrun as a process."""
    words = shlex.split(line)
    assert words[0] in ("lockstep", "torchrun"), f"no test knows how to run {words[0]!r}"
    command = words[1:]
    kind = next((kind for kind in ("bench train", "train", "profile", "verify") if f" {kind} " in f"{line} "), "")
    if SHORTER.get(kind, ["--none"])[0] not in words:
        command += SHORTER.get(kind, [])
    if kind in ("train", "profile") and "--run-dir" not in words:
        command += ["--run-dir", f"runs/{abs(hash(line))}"]
    if words[0] == "lockstep":
        with chdir(folder):
            assert main(command) == 0, line
        return
    command = [sys.executable, "-m", "torch.distributed.run", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def is_quick(line: str) -> bool:
    return line.startswith(("lockstep plan", "lockstep launch"))


def page_params(quick: bool) -> list[str]:
    chosen = []
    for page in PAGES:
        if any(reason(line) is None and is_quick(line) == quick for line in lines_of(page)):
            chosen.append(str(page.relative_to(ROOT)))
    return chosen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("my_nets.py", "my_cuts.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [page if page == "README.md" else pytest.param(page, marks=pytest.mark.slow) for page in page_params(quick=True)],
)
def test_quick_commands_of_a_page_run(page: str, folder: Path) -> None:
    for line in lines_of(ROOT / page):
        if reason(line) is None and is_quick(line):
            run(line, folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", page_params(quick=False))
@pytest.mark.long
def test_commands_of_a_page_run(page: str, folder: Path) -> None:
    """In order, in one folder: a later one may go on from an earlier one's."""
    for line in lines_of(ROOT / page):
        if reason(line) is None and not is_quick(line):
            run(line, folder)


def test_every_reason_is_needed() -> None:
    lines = [line for page in PAGES for line in lines_of(page)]
    for start in REASONS:
        assert any(line.startswith(start) for line in lines), f"no page has {start!r} any more"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "api.md"], ids=lambda page: page.name)
def test_code_of_a_page_stands_elsewhere(page: Path) -> None:
    """It is included from what is run: docs/fill_pages.py. (docs/api.md's examples run in tests/test_api.py.)"""
    included = re.sub(r"<!-- code: .*?<!-- end -->", "", page.read_text(), flags=re.S)
    assert not re.search(r"(?m)^```(?:python|yaml)", included), "mark it, and run python docs/fill_pages.py"
