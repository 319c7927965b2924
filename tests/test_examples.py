"""Every example runs as its first lines say; `lockstep.save` and `lockstep.load` under all wrappers."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples.own_loop import STRATEGIES, wrapped
from torch import Tensor, nn

import lockstep
from lockstep.layout.world import World
from tests.ranks import LONG, on_ranks
from tests.test_images import make_images

EXAMPLES = Path("examples")
FAST = {
    "own_loop.py": (["--steps", "20", "--strategy", "zero2"], "step   20  loss of rank 0's samples"),
    "compare_ddp_fsdp.py": (["--steps", "4", "--width", "32"], "largest difference of a loss: 0.0e+00"),
    "language_model.py": (["--steps", "20", "--context", "16"], "step   20  loss"),
    "naive_ddp.py": (["--steps", "10"], "of the step"),
    "one_file.py": (["--steps", "10", "--batch", "8"], "of a step"),
    "recipes.py": (["--steps", "6", "--strategy", "zero3"], "6 tensors in the whole state"),
    "sharded_model.py": (["--steps", "20", "--width", "32"], "step   20  loss of rank 0's samples"),
    "image_classifier.py": (["--folder", "images", "--epochs", "2", "--batch-size", "9"], "of the test images"),
    "finetune_lora.py": (
        ["--model", "llama", "--text", "text.txt", "--steps", "10", "--context", "8", "--shard", "fsdp"],
        "trained 1,024",
    ),
}


def test_every_example_is_tested() -> None:
    imported = {"my_cuts.py", "my_nets.py"}  # by the commands of docs/own.md: tests/test_doc_blocks.py
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(FAST) | imported | {"experiments.py"}
    assert len((EXAMPLES / "naive_ddp.py").read_text().splitlines()) < 80


def slow_unless(*quick: str) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in FAST]


@pytest.mark.parametrize("name", slow_unless("own_loop.py"))
def test_it_runs(name: str, tmp_path: Path) -> None:
    flags, said = FAST[name]
    if name == "image_classifier.py":
        make_images(tmp_path / "images")
    if name == "finetune_lora.py":
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        transformers.LlamaConfig(**sizes, vocab_size=256).save_pretrained(tmp_path / "llama")
        (tmp_path / "text.txt").write_bytes(b"some text\n" * 100)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    start = launcher if name in ("naive_ddp.py", "one_file.py") else [sys.executable]
    script = str((EXAMPLES / name).absolute())
    done = subprocess.run([*start, script, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr[:3000] + done.stderr[-1000:]
    assert said in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("edit", [("TOP_K = 1.0", "TOP_K = 0.1"), ("LOCAL_STEPS = 1 ", "LOCAL_STEPS = 4 ")])
def test_the_marked_edits_run(edit: tuple[str, str], tmp_path: Path) -> None:
    text = (EXAMPLES / "one_file.py").read_text()
    assert text.count(edit[0]) == 1
    (tmp_path / "mine.py").write_text(text.replace(*edit))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "mine.py", "--steps", "30"]
    done = subprocess.run(
        [sys.executable, *words, "--batch", "8"], cwd=tmp_path, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stderr[:3000] + done.stderr[-1000:]
    first, *_, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout))
    assert last < first


def test_the_page_of_experiments_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the results of a run, which takes minutes: `docs/results/cpu2/experiments`."""
    from examples import experiments

    folder = tmp_path / "experiments"
    shutil.copytree("docs/results/cpu2/experiments", folder)
    (folder / "experiments.md").unlink()
    started = []
    monkeypatch.setattr(
        experiments.subprocess, "run", lambda words, **_: started.append(words) or SimpleNamespace(returncode=0)
    )
    monkeypatch.setattr(sys, "argv", ["experiments.py", "--out", str(folder), "--nproc", "2"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    experiments.main()
    assert [words[3] for words in started] == ["verify"]  # all else has been measured
    page = (folder / "experiments.md").read_text()
    assert page.count("\n## ") == 6
    rows = json.loads((folder / "naive_ddp.json").read_text())["result"]["rows"]
    naive = next(row for row in rows if row["label"] == "naive")
    assert re.search(rf"naive: step, ms +\| - +\| [\d,]+ +\| {naive['step_ms']:,.0f} ", page)
    assert re.search(rf"naive: communication +\| 20% to 40% +\| \d+% +\| {naive['exposed_fraction']:.0%} ", page)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, world: World) -> None:
    batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    mine = lockstep.shard_batch(batch, world.rank, world.size)
    optimizer.zero_grad()
    model(mine).square().mean().backward()
    optimizer.step()


def weights(model: Any) -> dict[str, Tensor]:
    """Whole, by name."""
    if hasattr(model, "full_state_dict"):
        return dict(model.full_state_dict())
    named = getattr(model, "module", model).state_dict()
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for name, t in named.items()}


def save_under_each(world: World, folder: str) -> None:
    for name in STRATEGIES:
        model, optimizer = wrapped(network(), name)
        for step in range(3):
            one_step(model, optimizer, step, world)
        lockstep.save(f"{folder}/{name}", model, optimizer, step=3)


def go_on_under_each(world: World, folder: str) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Saved by one, gone on with by another, at other ranks."""
    found = {}
    for theirs, mine in zip(STRATEGIES, (*STRATEGIES[4:], *STRATEGIES[:4]), strict=True):
        model, optimizer = wrapped(network(), mine)
        assert lockstep.load(f"{folder}/{theirs}", model, optimizer) == 3
        one_step(model, optimizer, 3, world)
        found[theirs, mine] = weights(model)
    return found


def test_what_one_wrapper_saves_another_loads_at_other_ranks(tmp_path: Path) -> None:
    plain = network()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(4):
        one_step(plain, optimizer, step, World())
    on_ranks(save_under_each, 2, str(tmp_path))
    for found in on_ranks(go_on_under_each, 3, str(tmp_path)):
        for pair, state in found.items():
            for name, tensor in plain.state_dict().items():
                assert torch.allclose(state[name], tensor, atol=1e-12), (pair, name)


def test_one_process_loads_what_ranks_have_saved(tmp_path: Path) -> None:
    on_ranks(save_under_each, 2, str(tmp_path))
    first, second = network(), network()
    assert lockstep.load(tmp_path / "zero3", first) == lockstep.load(tmp_path / "naive" / "step-00000003", second) == 3
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-12)
    assert lockstep.load(tmp_path / "nothing", first) == 0
    with pytest.raises(lockstep.UserError, match="which this model has not"):
        lockstep.load(tmp_path / "zero3", nn.Linear(2, 2, dtype=torch.float64))
    (tmp_path / "zero3" / "step-00000003" / "manifest.json").write_text("{}")
    with pytest.raises(lockstep.UserError, match="no whole checkpoint"):
        lockstep.load(tmp_path / "zero3", first)


def test_a_process_by_itself_is_a_world_of_one() -> None:
    assert (lockstep.init().rank, lockstep.init().size) == (0, 1)


def ask() -> tuple[int, int, float]:
    world = lockstep.init(seed=5)
    return world.rank, world.size, torch.rand(1).item()


def test_spawned_ranks_know_their_world() -> None:
    (first, second) = lockstep.spawn(ask, nproc=2, device="cpu")
    assert (first[:2], second[:2]) == ((0, 2), (1, 2))
    assert first[2] == second[2]


class Named(nn.Module):
    """With a part that is called as wrappers call what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 2)


def test_nothing_is_left_out_in_silence(tmp_path: Path) -> None:
    first, second = Named(), Named()
    groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(first.parameters())]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    for group in optimizer.param_groups:
        group["lr"] /= 2  # a schedule's doing
    first.head(first.module(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    lockstep.save(tmp_path / "a", first, optimizer, step=1)
    again = torch.optim.SGD([{"params": [p], "lr": 1.0} for p in second.parameters()], momentum=0.9)
    assert lockstep.load(tmp_path / "a", second, again) == 1
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert [group["lr"] for group in again.param_groups] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    with pytest.raises(lockstep.UserError, match=r"has model\.head\.bias \(and 1 more\), which this model has not"):
        lockstep.load(tmp_path / "a", nn.ModuleDict({"module": nn.Linear(2, 2)}))
    lockstep.save(tmp_path / "b", first, step=1)
    with pytest.raises(lockstep.UserError, match="saved without the optimizer's state"):
        lockstep.load(tmp_path / "b", second, again)
    with pytest.raises(lockstep.UserError, match="step is -1"):
        lockstep.save(tmp_path / "b", first, step=-1)


def test_what_other_processes_cannot_find_is_refused() -> None:
    with pytest.raises(lockstep.UserError, match="define it at the top of a file"):
        lockstep.spawn(lambda: 1, nproc=2, device="cpu")
