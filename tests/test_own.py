"""A user's own model, data, loss, optimizer and schedule, by where they are imported from."""

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cli import main
from lockstep.config import Checkpoint, Config, Data, Own, Parallel, Train, load_config, save_config
from lockstep.data import Reader, Share, build_data
from lockstep.errors import UserError
from lockstep.layout.world import World
from lockstep.models import build_model, check_outputs, forward_flops
from lockstep.training.logger import makes_no_sense
from lockstep.training.loop import train
from lockstep.training.prepare import load_data, prepare_strategy
from tests import own_code
from tests.ranks import on_ranks

NET = Own(import_="tests.own_code:Net", args={"width": 8})


def config(data: str, **settings: Any) -> Config:
    given = {"epochs": 2, "batch_size": 20, "lr": 0.05, "log_every": 1, **settings}
    return Config(NET, Data("own", import_=f"tests.own_code:{data}", classes=4), Train(**given))


def losses(world: World, given: Config) -> list[float]:
    return train(world, given, quiet=True).losses


def test_what_was_never_logged_is_told_all_the_same() -> None:
    quiet = config("arrays", steps=4, log_every=100, evaluate_steps=1, batch_size=30)
    loud = config("arrays", steps=4, log_every=4, evaluate_steps=3, batch_size=30)
    rare, often = (train(World(), given, quiet=True) for given in (quiet, loud))
    assert rare.loss == pytest.approx(often.loss)
    assert rare.spent.steps == often.spent.steps == 4
    assert rare.spent.training <= rare.seconds


@pytest.mark.parametrize("data", ["tensors", pytest.param("by_number", marks=pytest.mark.slow)])
def test_every_number_of_ranks_trains_alike(data: str) -> None:
    own = {"loss": "tests.own_code:smoothed", "optimizer": "torch.optim:RMSprop", "schedule": "tests.own_code:linear"}
    given = config(data, **own, precision="fp64")
    (alone,) = on_ranks(losses, 1, given)
    assert len(alone) == 2 * ceil(90 / 20)
    for name in ("bucketed", "zero3"):
        for found in on_ranks(losses, 3, replace(given, parallel=Parallel(name))):
            assert found == pytest.approx(alone, abs=1e-10), name


def test_workers_read_the_same() -> None:
    given = config("by_number")
    plain, ahead = (train(World(), replace(given, data=replace(given.data, workers=w)), quiet=True) for w in (0, 2))
    assert plain.losses == ahead.losses


def test_a_stream_is_read_exactly_once_by_any_number_of_ranks_from_any_position() -> None:
    split = build_data(config("in_a_row")).train
    whole, _ = own_code.samples()
    for ranks in (1, 3):
        for start in (0, 2):
            readers = [Reader(split, 20, 0, Share(r, ranks)).epoch(0, start) for r in range(ranks)]
            for step in range(start, 9):  # 4.5 global batches are one reading of it: then it begins again
                rows = torch.cat([next(reader)[1].inputs for reader in readers])
                wanted = torch.arange(20 * step, 20 * step + 20) % 90
                assert torch.equal(rows, whole[wanted]), (ranks, start, step)


def test_a_stream_trains_and_goes_on(tmp_path: Path) -> None:
    given = config("in_a_row", steps=8, evaluate_every=0)
    whole = train(World(), given, quiet=True)
    half = replace(given, train=replace(given.train, steps=4))
    half.checkpoint.every = 4
    train(World(), replace(half, train=replace(half.train, steps=4, schedule="constant")), tmp_path, quiet=True)
    with pytest.raises(Exception, match=r"give --train\.steps"):
        train(World(), config("in_a_row", steps=None), quiet=True)
    assert len(whole.losses) == 8


def test_the_config_is_saved_as_it_was_written(tmp_path: Path) -> None:
    save_config(config("tensors", callbacks=("tests.own_code:told",)), tmp_path / "c.yaml")
    text = (tmp_path / "c.yaml").read_text()
    assert "import: tests.own_code:Net" in text
    assert load_config(tmp_path / "c.yaml") == config("tensors", callbacks=("tests.own_code:told",))


def test_flops_are_counted_where_a_model_does_not_say() -> None:
    spec = build_data(config("tensors")).spec
    with torch.device("meta"):
        model = build_model(NET, spec)
    assert forward_flops(model, spec) == 2 * (16 * 8 + 2 * 8 * 8 + 8 * 4)


def test_callbacks_patience_and_evaluation_by_steps() -> None:
    own_code.TOLD.clear()
    given = config("tensors", callbacks=("tests.own_code:told",), evaluate_steps=2, evaluate_batches=1, lr=0.0)
    result = train(World(), replace(given, train=replace(given.train, patience=2)), quiet=True)
    assert result.gave_up
    assert result.steps == 6  # at 2 the first, at 4 and 6 none better
    assert [step for kind, step in own_code.TOLD if kind == "test"] == [2, 4, 6]
    assert [step for kind, step in own_code.TOLD if kind == "train"] == [1, 2, 3, 4, 5, 6]


def test_patience_goes_on_counting_after_a_resume(tmp_path: Path) -> None:
    given = config("tensors", evaluate_steps=2, lr=0.0, steps=4, schedule="constant")
    given.checkpoint = Checkpoint(every=4)
    train(World(), given, tmp_path, quiet=True)  # at 2 the first, at 4 none better
    more = replace(given, train=replace(given.train, steps=20, patience=2))
    result = train(World(), more, tmp_path, quiet=True, resume=tmp_path)
    assert (result.gave_up, result.steps) == (True, 6)


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    """Where nothing becomes better, the first evaluation is the best of all; its checkpoint outlives `keep_last`."""
    given = config("tensors", evaluate_steps=2, lr=0.0, steps=10, schedule="constant")
    given.checkpoint = Checkpoint(every=2, keep_last=2, keep_best=True)
    result = train(World(), given, tmp_path, quiet=True)
    assert result.best is not None
    assert result.best[1] == 2
    folder = tmp_path / "checkpoints"
    assert sorted(p.name for p in folder.glob("step-*")) == ["step-00000002", "step-00000008", "step-00000010"]
    assert (folder / "best").resolve().name == "step-00000002"
    again = replace(given, checkpoint=Checkpoint(keep_best=True), train=replace(given.train, lr=0.5))
    better = train(World(), again, tmp_path / "again", quiet=True, resume=folder / "best")
    assert better.resumed_at == 2
    assert better.best is not None
    assert better.best[0] < result.best[0]
    assert (tmp_path / "again/checkpoints/best/manifest.json").exists()


def test_a_callback_that_raises_is_one_line() -> None:
    with pytest.raises(UserError, match=r"train.callbacks tests.own_code:fails: ZeroDivisionError.*own_code.py, line"):
        train(World(), config("tensors", callbacks=("tests.own_code:fails",)), quiet=True)


def test_a_model_that_the_meta_device_cannot_run_is_tried_for_real() -> None:
    """A `.item()` is no mistake, and what is one is told apart from it."""
    spec = build_data(config("tensors")).spec
    check_outputs(Own(import_="tests.own_code:Looks"), spec, None)
    with pytest.raises(UserError, match="cannot take samples of"):
        check_outputs(Own(import_="tests.own_code:Looks", args={"features": 5}), spec, None)


def notes(world: World) -> list[list[str]]:
    given, found = config("tensors", batch_size=1), []
    dataset = load_data(world, given)
    for name in ("single", "bucketed"):
        asked = replace(given, parallel=Parallel(name))
        found.append(makes_no_sense(asked, prepare_strategy(world, asked, dataset)))
    return found


def test_a_setup_without_sense_is_told() -> None:
    (alone, few), _ = on_ranks(notes, 2)
    assert "each of the 2 ranks trains all of it by itself" in alone[0]
    assert "a global batch of 1 leaves 1 of 2 ranks without a sample" in few[0]


COMMON = "--device cpu --train.epochs 1 --train.batch-size 30"


@pytest.mark.slow
def test_commands_take_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = "--model.import tests.own_code:Net --model.args.width 8 --data.import tests.own_code:by_number"
    run = f"train {own} {COMMON} --train.batch-per-rank 10 --train.accumulation 2 --nproc 2 --run-dir {tmp_path}/r"
    assert main([*run.split(), "--checkpoint.every", "2"]) == 0
    out = capfd.readouterr().out
    assert "global batch 40 = 10 per rank x 2 micro-batches x 2 ranks" in out
    for word in ("reached: train loss", "samples/s without evaluation and saving", "time: ", "peak memory of a rank"):
        assert word in out
    named = ["--model.import", "tests.own_code:Net"]  # else no code that a run's folder names is run
    assert main(["export", f"{tmp_path}/r", "--out", f"{tmp_path}/w.safetensors", *named]) == 0
    verified = "--strategies bucketed zero3 --world-size 2 --steps 2 --device cpu"
    assert main(["verify", *own.split(), "--train.loss", "tests.own_code:smoothed", *verified.split()]) == 0
    assert "2 of 2 passed" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model.import tests.own_cod:Net", "there is no module tests.own_cod, neither installed nor in"),
        ("--model.import tests.own_code:Nett", "tests.own_code has no Nett; it has"),
        ("--model.import tests.own_code", "must be package.module:object"),
        ("--model.import tests.own_code:Net --model.args.widht 3", "does not take the arguments {'widht': 3}"),
        ("--model.import tests.own_code:not_a_module", "must give an nn.Module, and gave a int"),
        ("--model.import tests.own_code:broken", "must be a class or a function"),
        ("--model.import tests.own_code:Net", "Net cannot take samples of 1x8x8 (images): RuntimeError: mat1 and mat2"),
        (
            "--model.import tests.own_code:Net --data.import tests.own_code:more_classes",
            "gives outputs of shape (4,) for one sample, and the data has 5 classes",
        ),
        ("--model.name own", "model.name own needs model.import"),
        ("--model.args.width 3", "give --model.import as well"),
        ("--model.import tests.own_code:Net --model.args.width", "has no value behind it"),
        (
            "--train.optimizer sdg",
            "must be one of sgd, adam, adamw, adamw_8bit, adamw_bf16, muon, schedule_free, or package.module:object",
        ),
        ("--train.loss mse", "must be package.module:function"),
        (
            "--model.import tests.own_code:Net --data.import tests.own_code:tensors "
            "--train.loss tests.own_code:per_sample",
            "must return one number",
        ),
        ("--data.import tests.own_code:samples", "training set must be (inputs, targets)"),
        (
            "--model.import tests.own_code:Pair --data.import tests.own_code:tensors",
            "gives a dict, and must give a tensor",
        ),
        (
            "--model.import tests.own_code:Net --data.import tests.own_code:in_dicts",
            "must be (input, target), and is a dict",
        ),
        ("--model.import tests.own_code:Net --data.import tests.own_code:odd_test", "and the data has 8 classes"),
        (
            "--model.import tests.own_code:Net --data.import tests.own_code:tensors "
            "--train.schedule tests.own_code:nothing",
            "must give a factor of the rate, and gave None",
        ),
        ("--data.import tests.own_code:not_a_module", "must return a training and a test set, and has returned int"),
    ],
)
def test_mistakes_are_one_line(flags: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", *COMMON.split(), *flags.split(), "--run-dir", str(tmp_path / "r")]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1, err


def test_a_batch_norm_cannot_be_verified(capsys: pytest.CaptureFixture[str]) -> None:
    own = "--model.import tests.own_code:Normed --data.import tests.own_code:tensors"
    assert main(["verify", *own.split(), "--strategies", "bucketed", "--device", "cpu"]) == 2
    assert "layers.1 is a BatchNorm" in capsys.readouterr().err
