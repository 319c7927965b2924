"""`lockstep judge`: strangers' scripts, right and wrong (`tests/judged`), and whatever else a script may do."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep.judge
from lockstep.cli import main
from lockstep.judge import ledger, samples
from lockstep.judge.assemble import Side
from lockstep.judge.changes import Settings
from lockstep.judge.compare import Samples
from lockstep.judge.holding import pieces
from lockstep.judge.judging import Reference, reference_of
from lockstep.judge.runs import Run, run
from lockstep.judge.store import Process, Store, Stored
from tests import warm
from tests.judged import cases
from tests.judged.cases import CLEAN, FAULTS, ODD, Case, asked, candidate_command, judged, problem, reference_command

EACH = 400


# ---- the strangers' scripts --------------------------------------------------------------------------------------


class References:
    """Each runs once for all the candidates that are held against it."""

    def __init__(self) -> None:
        self.stack, self.known = ExitStack(), dict[tuple[object, ...], Reference]()

    def of(self, case: Case) -> Reference:
        key = cases.PYTHON, case.reference, case.steps, case.no_dropout
        if key not in self.known:
            self.known[key] = self.stack.enter_context(reference_of(asked(case)))
        return self.known[key]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    os.environ["OUTPUT"] = str(tmp_path_factory.mktemp("output"))
    found = References()
    with found.stack:
        yield found


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts run in forks of a process that has imported torch: to import it is most of what they do. Those that
    do odd things run in processes of their own.
    """
    monkeypatch.setattr(cases, "PYTHON", warm.python())


def by_reference(some: list[Case]) -> list[Case]:
    return sorted(some, key=lambda case: case.reference)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.timeout(EACH)
@pytest.mark.parametrize("case", by_reference([one for one in FAULTS if one.sampled]), ids=lambda case: case.name)
def test_a_fault_is_named(case: Case, references: References, forked: None) -> None:
    assert (said := problem(case, judged(case, references.of(case)))) is None, said


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.timeout(EACH)
@pytest.mark.parametrize("case", by_reference([one for one in CLEAN if one.sampled]), ids=lambda case: case.name)
def test_what_is_right_is_equal(case: Case, references: References, forked: None) -> None:
    if case.missing:
        pytest.skip(f"{case.missing} is not installed")
    assert (said := problem(case, judged(case, references.of(case)))) is None, said


def test_there_are_enough_of_them() -> None:
    assert len([case for case in FAULTS if case.thread]) >= 16
    assert len(CLEAN) >= 60
    assert len({case.name for case in [*FAULTS, *CLEAN]}) == len(FAULTS) + len(CLEAN)


# ---- the command -------------------------------------------------------------------------------------------------


def of_case(text: str) -> Case:
    return next(case for case in FAULTS if text in case.candidate)


@pytest.mark.slow
@pytest.mark.timeout(EACH)
def test_the_command_names_a_fault_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, file, page = of_case("--fault skips_bias"), tmp_path / "verdict.json", tmp_path / "page.html"
    with candidate_command(case) as candidate:
        words = ["--reference", reference_command(case), "--candidate", candidate, "--steps", "2"]
        assert main(["judge", *words, "--json", str(file), "--html", str(page)]) == 1
    said = capsys.readouterr().out
    assert "differs at step 1, first in: gradient" in said
    assert (
        "the gradient of last.bias was never reduced: each rank has its own, and their mean is the reference's" in said
    )
    found = json.loads(file.read_text())
    assert (found["verdict"], found["step"], found["what"]) == ("differs", 1, "gradient")
    assert (found["names"], found["ranks"]) == (["last.bias"], [0, 1])
    assert "and these 3 went through none" in found["ledger"]
    assert "gradient of last.bias" in page.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--candidate", "true"], "needs --reference"),
        (["--reference", "true"], "needs --candidate"),
        (["--reference", "true", "--candidate", "true", "--steps", "0"], "--steps is 0, but it must be 1 or more"),
        (["--reference", "true", "--candidate", "true", "--timeout", "0"], "must be more than 0 seconds"),
        (["--reference", "true", "--candidate", "true", "--json", "/nowhere/a.json"], "/nowhere"),
    ],
)
def test_a_mistake_gets_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", *words]) != 0
    shown = capsys.readouterr()
    assert said in shown.err + shown.out
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("true", "no step of an optimizer was seen"),
        ("exit 3", "exit status 3"),
        ("no-such-program", "not found"),
    ],
)
def test_what_cannot_be_judged_says_why(reference: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "--reference", reference, "--candidate", "true"]) == 2
    assert why in capsys.readouterr().out


# ---- scripts that do odd things ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(EACH)
@pytest.mark.parametrize("case", by_reference([one for one in ODD if one.sampled]), ids=lambda case: case.name)
def test_it_survives(case: Case, references: References) -> None:
    assert (said := problem(case, judged(case, references.of(case)))) is None, said


THEIRS = """
import sys
import torch
torch.manual_seed(0)
net, x = torch.nn.Linear(4, 2), torch.randn(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    net(x).pow(2).sum().backward()
    optimizer.step()
with open(sys.argv[1], "a") as out:
    print(theirs, sys.path[0], repr(net.weight.sum().item()), file=out)
"""


@pytest.mark.slow
@pytest.mark.timeout(EACH)
def test_nothing_of_the_users_is_changed(tmp_path: Path) -> None:
    """Its own start-up file runs, its folders come first on the path, and its result is what it is alone."""
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = 'theirs'\n")
    script, result = tmp_path / "script.py", tmp_path / "result"
    script.write_text(THEIRS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, str(script), str(result)], check=True, env=environment)
    one = f"{sys.executable} {script} {result}"
    command = [sys.executable, "-m", "lockstep", "judge", "--reference", one, "--candidate", one]
    assert subprocess.run([*command, "--steps", "9"], env=environment).returncode == 0
    alone, watched, moved, again = result.read_text().splitlines()
    assert alone == watched == again != moved


SAYS_WHERE = """
import os, sys
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as out:
    print(os.environ["LOCAL_RANK"], os.environ["NCCL_HOSTID"], os.environ["NCCL_NET"], file=out)
"""


def test_ranks_that_share_a_gpu_are_hosts_of_their_own(tmp_path: Path) -> None:
    """As NCCL wants it, before the script reads its environment."""
    script = tmp_path / "script.py"
    script.write_text(SAYS_WHERE)
    start = f"RANK=$rank LOCAL_RANK=$rank {sys.executable} {script} {tmp_path}"
    run(f"for rank in 0 1; do {start}; done", tmp_path / "shared", Settings(share_gpu=True), 60)
    (first, one, net), (second, other, _) = ((tmp_path / rank).read_text().split() for rank in "01")
    assert (first, second, net) == ("0", "0", "Socket")
    assert one != other


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_to_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "--reference", "true", "--candidate", "true", "--share-gpu"]) == 2
    assert "--share-gpu was given, but torch sees no GPU here" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(EACH)
def test_ctrl_c_ends_all_that_it_has_started(tmp_path: Path) -> None:
    marker = tmp_path / "a-script-of-its-own.py"
    marker.write_text("import time, torch\ntime.sleep(1000)\n")
    one = f"{sys.executable} {marker}"
    command = [sys.executable, "-m", "lockstep", "judge", "--reference", f"{one} & {one} & wait", "--candidate", "true"]
    process = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(running(str(marker))) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) != 0
    assert running(str(marker)) == []


def running(word: str) -> list[str]:
    """Commands with this word in them, but for the one that is looked for it with."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.encode() in one for one in words) and b"judge" not in words:
            found.append(file.parent.name)
    return found


# ---- parts -------------------------------------------------------------------------------------------------------


def side(tmp_path: Path, rows: list[list[float]]) -> Side:
    """A run whose ranks have read these."""
    found = []
    for rank, mine in enumerate(rows):
        noted = samples.noted(torch.tensor(mine)[:, None] if mine else torch.empty(0, 1))
        event = {"kind": "step", "optimizer": 0, "step": 1, "inputs": [[noted]]}
        found.append(Process(rank, len(rows), [event]))
    return Side(Run("", tmp_path / "run", found))


@pytest.mark.parametrize(
    ("ranks", "wrong", "named"),
    [
        ([[1, 2], [3, 4]], "", []),
        ([[4, 2], [3, 1]], "", []),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], "", []),
        ([[1, 2], [1, 2]], "2 of 4 samples were seen more than once (by ranks 0, 1), 2 of 4 samples were never seen",
         [0, 1]),
        ([[1, 2], [3, 9]], "1 of 4 samples were never seen, 1 samples are not of the reference's step", [1]),
        ([[1, 2], [3]], "1 of 4 samples were never seen", []),
        ([[5, 6], [7, 8]], "none of the 4 samples of the reference's step was seen, but 4 others", [0, 1]),
    ],
)  # fmt: skip
def test_which_samples_were_seen(ranks: list[list[float]], wrong: str, named: list[int], tmp_path: Path) -> None:
    found = Samples(side(tmp_path, [[1, 2, 3, 4]]), side(tmp_path, ranks), (0, 1))
    assert (found.wrong, found.ranks) == (wrong, named)


def test_names_are_freed_of_wrappers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)  # their own, of the same name
            self.head = nn.Linear(2, 2)

    net = Net()
    names = [piece.name for piece in pieces(net)]
    assert names == ["module.weight", "module.bias", "head.weight", "head.bias"]
    assert [piece.name for piece in pieces(nn.DataParallel(net))] == names


def test_a_region_says_what_is_held() -> None:
    net = nn.Linear(3, 2)
    lockstep.judge.region(net.weight, "whole.weight", [((2, 0), (2, 3))])
    (weight, bias) = pieces(net)
    assert (weight.name, weight.count) == ("whole.weight", 6)
    weight.fill(torch.arange(12.0).view(4, 3))
    assert net.weight.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert bias.name == "bias"


def test_without_the_command_watch_does_nothing() -> None:
    before = nn.Module.__call__
    lockstep.judge.watch(nn.Linear(2, 2))
    assert nn.Module.__call__ is before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back_from_the_store(dtype: torch.dtype, tmp_path: Path) -> None:
    store, generator = Store(tmp_path), torch.Generator().manual_seed(0)
    for shape in ((), (0,), (1,), (7, 3), (5, 1, 2)):
        tensor = torch.randn(shape, generator=generator).mul(3).to(dtype)
        noted = store.put(tensor.t() if tensor.dim() == 2 else tensor)
        assert store.put((tensor.t() if tensor.dim() == 2 else tensor).clone()) == noted
        back = store.get(Stored(noted[0], noted[1], tuple(noted[2])))
        assert torch.equal(back, tensor.t() if tensor.dim() == 2 else tensor)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ({0: [], 1: []}, "no rank took part in any reduction"),
        ({0: [("all_reduce", (0, 1), 1, 97)], 1: [("all_reduce", (0, 1), 1, 97)]}, "these 3 went through none"),
        ({0: [("all_reduce", (0,), 1, 100)], 1: [("all_reduce", (1,), 1, 100)]}, "none over all of ranks 0, 1"),
        ({0: [("all_reduce", (0, 1), 1, 100)], 1: []}, "rank 1: none"),
    ],
)
def test_what_the_ledger_says(lines: dict[int, list[ledger.Line]], said: str) -> None:
    assert said in ledger.missing(lines, {0, 1}, 3, 100)
