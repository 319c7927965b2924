"""The command as a person meets it: help with an example everywhere, and one clear line for every mistake."""

import importlib
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.bar import Bar
from lockstep.cli import COMMANDS, main
from lockstep.cli.checks import check_model
from lockstep.cli.flags import flags_of, refuse_unknown, sections
from lockstep.cli.others import OTHERS
from lockstep.config import Config, Own, Parallel, load_config
from lockstep.config.load import MODELS, valid_keys
from lockstep.launch import Launch
from lockstep.results.record import read_record
from tests.ranks import LONG


def lockstep(*words: str, timeout: float = LONG) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_without_words_it_lists_the_commands() -> None:
    for words in ((), ("--help",)):
        done = lockstep(*words)
        assert done.returncode == 0
        assert all(f"lockstep {name}" in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*name.split(), "--help"])
    assert exit_.value.code == 0
    said = capsys.readouterr().out
    assert "For example" in said
    assert f"lockstep {name}" in said


MISTAKES = {
    "fly": "unknown command 'fly'; there are demo, train, configs, learn, tokenize, generate, export, import, verify",
    "bench fly": "unknown command 'bench fly'",
    "train absent.yaml": "absent.yaml: cannot be read",
    "train --model.chanels 3": "unknown flag --model.chanels; did you mean model.channels?",
    "train --model.depth 18": "unknown flag --model.depth: it belongs to model.name resnet",
    "train --train.channels 18": "unknown flag --train.channels; did you mean model.channels?",
    "train --model.name vgg": "model.name is 'vgg', but it must be one of mlp, cnn, resnet, gpt",
    "train --nprocs 2": "unknown flag --nprocs; did you mean --nproc?; see lockstep train --help",
    "train --train.lr abc": "--train.lr is 'abc', but it must be a number",
    "train --train.precision=fp9": "--train.precision is 'fp9', but it must be one of fp32, fp64, bf16, fp16, fp8",
    "train --train.batch-size 0": "train.batch_size is 0, but it must be 1 or more",
    "train --nproc 0": "--nproc is 0, but it must be 1 or more",
    "train --parallel.data magic": "parallel.data is 'magic', but it must be one of single, naive",
    "train --device cpu --nproc 2 --parallel.data ddp --parallel.compression topk": "does not go with",
    "train --data.name mnist --data.no-download --data.path /nowhere": "put the four MNIST files into",
    "verify --strategies magic": "strategy 'magic' does not exist; there are single, naive",
    "verify --world-size 0": "--world-size is 0, but it must be 1 or more",
    "verify --train.z-loss 1e-4": "lockstep verify has settings of its own for --train.z-loss",
    "verify --model.name resnet": "use --model.norm group",
    "demo now": "lockstep demo takes flags only, but was given 'now'",
    "demo --epochs 0": "--epochs is 0, but it must be 1 or more",
    "bench train --steps 0": "at least 1 step",
    "bench train --csv /nowhere/x.csv": "--csv /nowhere/x.csv: there is no folder /nowhere",
    "train --share-gpu --nproc 2": "--share-gpu was given, but torch sees no GPU here",
    "train --device cpu --model gpt --data text --model.attention cudnn": "model.attention cudnn is for GPUs",
    "verify --world-size 2 --strategies single,pp=2:naive:native": "pp=...:native has no naive; torch's schedules are",
    "verify --world-size 2 --strategies bucketed,tp=2:native": "tp=2:native goes with parallel.data single or fsdp",
    "verify --world-size 2 --strategies bucketed,cp=2:native --device cpu": "cp=...:native has kernels for GPUs only",
    "verify --world-size 2 --strategies bucketed,cp=2:ulysses:native": "cp=...:native is a ring",
    "train --nproc 2 --parallel.native tp": "parallel.native tp says how parallel.tp is cut, and that is 1",
    "verify --world-size 3 --strategies zero3,tp=2": "tp=2 does not divide the 3 ranks; start a multiple of 2",
    "verify --world-size 8 --strategies single,tp=8": "parallel.tp 8 does not divide model.heads, 4",
    "train configs/gpt2_small.yaml --device cpu": "these ranks run on the CPU; give --model.no-own-gelu",
    "train --device cpu --train.steps 1 --run-dir /dev/full": "--run-dir /dev/full cannot be written (File exists)",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_clear_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert MISTAKES[words] in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_that_are_read_without_torch_are_the_commands(name: str) -> None:
    module = importlib.import_module(COMMANDS[name][0])
    mine = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    found = {f.name for c in mine if c.__name__.endswith("Arguments") for f in fields(c)}
    launch = {f.name for f in fields(Launch)} if "launch" in found else set()
    assert flags_of(module.__name__) == {one.replace("_", "-") for one in (found - {"launch"}) | launch}


def test_mistakes_that_need_no_torch_import_none() -> None:
    for words in ("train --nprocs 2", "train --train.lr abc", "train absent.yaml", "bench comm --sizes 3"):
        code = f"import sys; from lockstep.cli import main; main({words.split()}); print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "False", words


def test_a_model_without_blocks_to_shard_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    for engine, told in (("zero3", True), ("fsdp", True), ("zero1", False)):
        check_model(Config(Own(import_="tests.own_code:Looks"), parallel=Parallel(data=engine)))
        assert ("Looks has no blocks to shard" in capsys.readouterr().err) == told


def test_a_mistake_leaves_the_process_with_status_2() -> None:
    done = lockstep("train", "--model.chanels", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown flag")


@pytest.mark.parametrize("words", ["train --nprok 2", "train --train.lr fast", "verify --steps many"])
def test_a_flag_that_the_parser_refuses_is_explained(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert words.split()[1] in err
    assert len(err.strip().splitlines()) == 1


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--train.steps", "2", "--model.channels", "3", "5", "--train.lr", "0.25", "--run-dir", str(run)]
    done = lockstep("train", "configs/digits_cnn.yaml", *flags)
    assert done.returncode == 0, done.stderr
    saved = (run / "config.yaml").read_text()
    assert "lr: 0.25" in saved
    assert "channels:\n  - 3\n  - 5" in saved
    assert "hidden: 128" in saved
    assert "2 steps in" in done.stdout


def test_verify_says_what_it_found() -> None:
    done = lockstep("verify", "--strategies", "bucketed+bf16", "bucketed+topk", "--world-size", "2", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 passed" in done.stdout


@pytest.mark.slow
def test_the_demo_ticks_every_equal_strategy(tmp_path: Path) -> None:
    done = lockstep("demo", "--epochs", "1", "--device", "cpu", "--run-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") >= 6
    assert "✗" not in done.stdout
    assert "Try next" in done.stdout
    rows = read_record(tmp_path / "demo.json").result["rows"]
    assert [row["speedup"] for row in rows] == [None] * len(rows)  # its one process has a rank's cores only


def test_torchrun_runs_the_same_command(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lockstep"]
    words = ["train", "--device", "cpu", "--train.steps", "2", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks on") == 1


ROOT = Path(__file__).parent.parent


def words_of(line: str) -> list[str]:
    """As a shell takes them apart; a sentence may have an apostrophe."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def commands_in(file: Path) -> list[list[str]]:
    """The words of every `lockstep ...` line in a page."""
    lines = file.read_text().replace("\\\n", " ").splitlines()
    words = [words_of(line.split("#")[0].strip().removeprefix("$ ")) for line in lines]
    return [one[1:] for one in words if len(one) > 1 and one[0] == "lockstep" and one[1] != "..."]


@pytest.mark.parametrize("file", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda f: f.name)
def test_the_commands_of_the_docs_have_the_flags_that_they_name(file: Path) -> None:
    keys = {key for model in MODELS.values() for key in valid_keys({**sections(Config()), "model": model})}
    for words in commands_in(file):
        name = next(n for n in (" ".join(words[:2]), words[0]) if n in COMMANDS)
        rest = words[len(name.split()) :]
        refuse_unknown(name, COMMANDS[name][0], rest)
        for word in rest:
            key = word.partition("=")[0].removeprefix("--").replace("-", "_").replace(".no_", ".").rstrip("`,;.")
            if word.startswith("--") and "." in key and ".args." not in key:
                assert key in keys, f"{file.name}: {word}"


def test_without_a_terminal_a_long_work_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.bar.EVERY", 0.0)
    with Bar(console=Console(file=StringIO())) as bar:
        task = bar.add_task("2 ranks: naive", total=4)
        bar.advance(task)
        bar.update(task, completed=3)
    assert capsys.readouterr().err == "2 ranks: naive: 25%\n2 ranks: naive: 75%\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "did you mean train?"),
        (["bench", "comms"], "there are bench comm, bench train, bench scaling\n"),
        (["train", "configs/digits_cnn.yaml", "--nproc", "two"], "--nproc is 'two', but it must be a whole number"),
    ],
)
def test_slips_are_recognized(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_what_other_tools_call_it_leads_to_flags_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    keys = set()
    for model in MODELS:
        keys |= set(valid_keys(sections(load_config(None, model))))
    commands = {flag for module, _ in COMMANDS.values() for flag in flags_of(module)}
    for words in OTHERS.values():
        for theirs, ours in words.items():
            for flag in re.findall(r"--([a-z.-]+[a-z])", ours):
                known = flag.replace("-", "_") in keys or flag in commands
                assert known, f"{theirs}: --{flag} is no flag of ours"
    assert main(["train", "--n_layer", "3"]) == 2
    assert "unknown flag --n_layer; here it is --model.layers" in capsys.readouterr().err
