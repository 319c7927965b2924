"""Strict configs: a mistake is one line that names the file, the key and the mend."""

import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import CNN, Config, Parallel, Train, check_ranges, load_config, save_config
from lockstep.config.shipped import shipped_configs
from lockstep.errors import UserError

MISTAKES = {
    "model: {name: cnn, chanels: [8]}": "unknown key model.chanels; did you mean model.channels?",
    "model: {name: cnn, depth: 18}": "unknown key model.depth: it belongs to model.name resnet",
    "train: {channels: [8]}": "unknown key train.channels; did you mean model.channels?",
    "nproc: 2": "unknown key nproc: it is a flag of the command (--nproc), not a key of the file",
    "lr: 0.1": "unknown key lr; did you mean train.lr?",
    "trian: {lr: 0.1}": "unknown key trian; did you mean train?",
    "train: {lr: fast}": "train.lr is 'fast', but it must be a number",
    "train: {epochs: 2.5}": "train.epochs is 2.5, but it must be a whole number",
    "train: {epochs: true}": "train.epochs is True, but it must be a whole number",
    "train: {optimizer: adamm}": "train.optimizer is 'adamm', but it must be one of sgd, adam, adamw",
    "model: {channels: 8}": "model.channels is 8, but it must be a list of whole numbers",
    "model: {name: vgg}": "model.name is 'vgg', but it must be one of mlp, cnn, resnet, gpt, hf, own",
    "train: {clip_norm: fast}": "train.clip_norm is 'fast', but it must be a number or null",
    "train: {precision: true}": "train.precision is True, but it must be one of ",
    "train: {lr: 1, lr: 2}": "key lr is given twice",
    "- 1": "holds list, but it must hold sections",
    "train: 3": "train is 3, but it must be a section of keys",
    "model: [": "is not valid YAML",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_names_file_key_and_mend(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        load_config(file)
    assert MISTAKES[text] in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"absent\.yaml: cannot be read"):
        load_config("absent.yaml")


def test_values_are_read_with_their_types(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: cnn, channels: [8, 16]}\ntrain: {lr: 1e-3, clip_norm: 1}\nparallel:\n")
    config = load_config(file)
    assert config.model == CNN(channels=(8, 16))
    assert config.train.lr == 1e-3
    assert config.train.clip_norm == 1.0
    assert config.parallel == Parallel()


def test_a_model_named_by_a_flag_drops_the_files_keys_for_another(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {name: cnn, channels: [8]}\ntrain: {lr: 0.5}")
    config = load_config(file, model_name="mlp")
    assert (config.model.name, config.train.lr) == ("mlp", 0.5)


def test_a_saved_config_loads_to_the_same(tmp_path: Path) -> None:
    config = Config(model=CNN(channels=(3, 5)), train=Train(lr=3e-5, clip_norm=None, betas=(0.8, 0.9)))
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("file", shipped_configs().values(), ids=lambda file: file.stem)
def test_every_shipped_config_is_valid(file: Path) -> None:
    check_ranges(load_config(file))


def test_ranges_are_checked() -> None:
    with pytest.raises(UserError, match=r"train\.batch_size is 0, but it must be 1 or more"):
        check_ranges(Config(train=Train(batch_size=0)))
    with pytest.raises(UserError, match=r"parallel\.topk_ratio is 2"):
        check_ranges(Config(parallel=Parallel(topk_ratio=2)))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghi")
)
HOSTILE = {
    "an anchor bomb": (BOMB, "more than 10,000 values"),
    "an anchor that contains itself": ("model: &m {name: cnn, again: *m}", "an anchor contains itself"),
    "a number of 5,000 digits": ("train: {steps: " + "9" * 5000 + "}", "has a value that cannot be"),
    "a date that is none": ("data: {path: 2026-13-45}", "has a value that cannot be"),
    "nested too deeply": ("a: " + "[" * 5000, "has a value that cannot be"),
    "a megabyte": ("#" * 2_000_000, "longer than 1,000,000 characters"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_one_line_at_once(tmp_path: Path, what: str) -> None:
    text, words = HOSTILE[what]
    file = tmp_path / "config.yaml"
    file.write_text(text)
    start = time.monotonic()
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        load_config(file)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("train", {"lr": float("inf")}, "train.lr is inf, but it must be from 0 to 1,000,000"),
        ("train", {"lr": 1e308}, "train.lr is 1e+308"),
        ("train", {"lr": float("nan")}, "train.lr is nan"),
        ("train", {"betas": (0.9, 2.0)}, "train.betas is (0.9, 2.0)"),
        ("train", {"clip_norm": 0.0}, "train.clip_norm is 0.0"),
        ("train", {"batch_size": 10**30}, "train.batch_size is 1000"),
        ("data", {"path": "a\0b"}, "data.path has a NUL character"),
        ("parallel", {"replicate": 0}, "parallel.replicate is 0"),
        ("model", {"channels": (10**10,)}, "model.channels is (10000000000,)"),
    ],
)
def test_values_that_no_run_can_use(section: str, values: dict[str, Any], words: str) -> None:
    config = Config()
    for name, value in values.items():
        setattr(getattr(config, section), name, value)
    with pytest.raises(UserError, match=re.escape(words)):
        check_ranges(config)
