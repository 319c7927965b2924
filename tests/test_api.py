"""What `import lockstep` offers: each name documented, each with an example that runs."""

import importlib.util
import inspect
import pydoc
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.layout.world import World
from tests.ranks import on_ranks

PAGE = Path(__file__).parent.parent / "docs/make_api.py"


def make_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(world: World, code: str, folder: str) -> None:
    """With what an example takes for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
    given: dict[str, Any] = {
        "lockstep": lockstep,
        "torch": torch,
        "nn": nn,
        "F": F,
        "world": world,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "inputs": torch.randn(8, 4),
        "targets": torch.randint(6, (8,)),
        "tokens": torch.randint(9, (2, 16)),
        **dict(zip("qkv", torch.randn(3, 2, 4, 16, 8), strict=True)),
    }
    exec(code.replace('"checkpoints"', repr(folder)), given)


def run_examples(world: World, codes: dict[str, str], folder: str) -> list[str]:
    for name, code in codes.items():
        try:
            run_example(world, code, f"{folder}/checkpoints")
        except Exception as error:
            raise AssertionError(f"the example of {name} fails") from error
    return list(codes)


def test_the_example_of_each_name_runs(tmp_path: Path) -> None:
    names = [name for name in lockstep.__all__ if name not in ("init", "spawn")]
    codes = {name: make_api().examples(inspect.getdoc(getattr(lockstep, name))) for name in names}
    assert [name for name in names if f"lockstep.{name}" not in codes[name]] == []
    assert on_ranks(run_examples, 2, codes, str(tmp_path)) == [names, names]


def joined() -> float:
    given: dict[str, Any] = {"lockstep": lockstep, "model": nn.Linear(4, 2), "inputs": torch.ones(6, 4)}
    exec(make_api().examples(inspect.getdoc(lockstep.init)), given)
    return float(given["mine"].sum())


def test_the_examples_of_starting_ranks_run() -> None:
    code = make_api().examples(inspect.getdoc(lockstep.spawn)).replace("lockstep.spawn(", "found = lockstep.spawn(")
    given: dict[str, Any] = {"lockstep": lockstep, "train": joined, "__name__": "__main__"}
    exec(code.replace("nproc=4", "nproc=2"), given)
    assert given["found"] == [12.0, 12.0]


def test_the_page_and_help_show_everything_public() -> None:
    api = make_api()
    assert sorted(name for names in api.CHAPTERS.values() for name in names) == sorted(lockstep.__all__)
    assert api.TARGET.read_text() == api.page(), "docs/api.md is old: python docs/make_api.py"
    shown = pydoc.plain(pydoc.render_doc(lockstep))
    for name in lockstep.__all__:
        assert name in shown
    assert 'lockstep.save("checkpoints", model, optimizer, step=100)' in shown
