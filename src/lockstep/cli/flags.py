"""The config that a command's flags build on. Nothing here needs torch: a mistake is said within a second."""

import ast
import dataclasses
from functools import cache
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import yaml

from lockstep.cli.others import refuse_unless_known
from lockstep.config import Config, load_config
from lockstep.config.check import check_word
from lockstep.config.load import field_name, nearest, valid_keys
from lockstep.config.shipped import find_config, shipped_configs
from lockstep.config.trust import check_trusted, is_of_a_run
from lockstep.errors import UserError

SHORT = {"--model": "--model.name", "--data": "--data.name"}
"""What people type."""


DEEPSPEED = {"deepspeed", "deepspeed-config"}
"""Of DeepSpeed's launcher, which `train` understands."""


def flags_of(module: str) -> set[str]:
    """A command's flags without a dot, read from the source of its dataclasses: to import it would import torch."""
    names = [name for name in _classes(module) if name.endswith("Arguments")]
    return {field.replace("_", "-") for name in names for field in _fields(module, name)}


def _fields(module: str, name: str) -> set[str]:
    tree, found = _source(module), set()
    imported = {a.name: str(n.module) for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    node = _classes(module)[name]
    for base in node.bases:
        found |= _fields(imported.get(ast.unparse(base), module), ast.unparse(base))
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign):
            continue
        field = ast.unparse(statement.target)
        found |= _fields("lockstep.launch.options", "Launch") if field == "launch" else {field}
    return found


def _classes(module: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _source(module).body if isinstance(node, ast.ClassDef)}


@cache
def _source(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None, f"{module} is ours"
    return ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))


def refuse_unknown(command: str, module: str, argv: list[str]) -> None:
    """A flag without a dot that the command does not have."""
    known = flags_of(module) | (DEEPSPEED if command == "train" else set())
    for word in argv:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").replace("_", "-")
        if not flag.startswith("--") or "." in name or flag in SHORT or name in ("", "help", "trust"):
            continue
        refuse_unless_known(flag, known, command)


def config_from(argv: list[str], default: Config | None = None) -> tuple[Config, list[str]]:
    """The config that the flags build on: the file given first (if any), for the model that a flag may name.

    Returns it and the arguments without the file. `default`: what to build on without a file.
    """
    file = argv[0] if argv and not argv[0].startswith("-") else None
    rest = [_spelt_out(word) for word in (argv[1:] if file is not None else argv)]
    rest, own = without_user_arguments(rest)
    model_name = flag_value(rest, "--model.name")
    if model_name is None and flag_value(rest, "--model.import") is not None:
        model_name = "own"
    fits = default is not None and file is None and model_name in (None, default.model.name)
    config = default if default is not None and fits else load_config(file, model_name)
    if file is not None and is_of_a_run(found := find_config(file)):
        check_trusted(config, found, chain.from_iterable(w.split("=", 1) for w in rest), "--trust" in rest)
    rest = [word for word in rest if word != "--trust"]
    for section, arguments in own.items():
        given: Any = getattr(config, section)
        if not hasattr(given, "args"):
            raise UserError(f"--{section}.args are for an imported {section}; give --{section}.import as well")
        given.args = {**given.args, **arguments}
    _refuse_late_file(rest)
    _refuse_unknown_flags(rest, config)
    _refuse_wrong_values(rest, config)
    return config, rest


def without_user_arguments(argv: list[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Take `--model.args.width 64` out, which only the user's own code knows. A value is read as YAML reads it."""
    rest: list[str] = []
    own: dict[str, dict[str, Any]] = {}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        section, _, key = flag.removeprefix("--").partition(".args.")
        if section not in ("model", "data") or not key or not flag.startswith("--"):
            rest.append(word)
            continue
        text = value if equals else next(words, None)
        if text is None or text.startswith("--"):
            raise UserError(f"{flag} has no value behind it")
        try:
            own.setdefault(section, {})[key.replace("-", "_")] = yaml.safe_load(text)
        except yaml.YAMLError:
            own.setdefault(section, {})[key.replace("-", "_")] = text
    return rest, own


def _spelt_out(word: str) -> str:
    flag, equals, value = word.partition("=")
    return SHORT.get(flag, flag) + equals + value


def _refuse_unknown_flags(argv: list[str], config: Config) -> None:
    """A dotted flag that is no key of the config: one line with the nearest, as for a config file."""
    valid = valid_keys(sections(config))
    for word in argv:
        flag = word.partition("=")[0]
        key = flag.removeprefix("--").replace("-", "_").replace(".no_", ".")  # --data.no-download
        if flag.startswith("--") and "." in key and key not in valid:
            raise UserError(f"unknown flag {flag}{nearest(key, valid)}")


def _refuse_wrong_values(argv: list[str], config: Config) -> None:
    """A word where a key takes a number, or none of the names that it takes. What is more involved tyro finds."""
    for before, word in pairwise(chain.from_iterable(w.split("=", 1) for w in argv)):
        section, _, key = before.removeprefix("--").replace("-", "_").partition(".")
        if before.startswith("--") and key and not word.startswith("--"):
            cls, field = type(getattr(config, section)), field_name(key)
            if field in {f.name for f in dataclasses.fields(cls)}:
                check_word(cls, section, field, word, before)


def _refuse_late_file(argv: list[str]) -> None:
    """A config file behind the flags, where a word is taken for a flag's value."""
    for before, word in zip(["", *argv], argv, strict=False):
        takes_a_value = before.startswith("--") and "=" not in before and not before.startswith("--no-")
        is_config = word.endswith((".yaml", ".yml")) or (word in shipped_configs() and "--strategies" not in argv)
        if is_config and not takes_a_value:
            raise UserError(f"the config {word} must come first, before all flags")


def flag_value(argv: list[str], flag: str) -> str | None:
    for index, word in enumerate(argv):
        if word == flag and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def without_flag(argv: list[str], *flags: str) -> list[str]:
    """The arguments without these flags and their values."""
    kept, skip = [], False
    for word in argv:
        if skip:
            skip = False
        elif word in flags:
            skip = True
        elif not any(word.startswith(f"{flag}=") for flag in flags):
            kept.append(word)
    return kept


def sections(config: Config) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
