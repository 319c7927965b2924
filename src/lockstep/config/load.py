"""From a YAML file to a Config, strictly, and back.

Every key must exist and every value must have its type; what does not is one UserError that names the
file, the key and the nearest valid name.
"""

import dataclasses
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml

from lockstep.config.check import check_choices, checked
from lockstep.config.models import Model
from lockstep.config.schema import Config
from lockstep.config.shipped import cannot_be_read, find_config
from lockstep.errors import UserError

COMMAND_FLAGS = ("nproc", "device", "backend", "share-gpu", "timeout", "run-dir", "resume", "strategies", "world-size")
"""Flags that are not part of a run's config, and are looked for in it all the same."""

MODELS: dict[str, type] = {cls().name: cls for cls in get_args(Model)}


def load_config(file: str | Path | None = None, model_name: str | None = None) -> Config:
    """The defaults, overlaid with `file`, or with the shipped config of that name. `model_name` (from a flag) wins over
    the file's `model.name`.
    """
    values = read_yaml(find_config(file)) if file is not None else {}
    where = str(file) if file is not None else "flags"
    model = values.get("model") or {}
    if not isinstance(model, dict):
        raise UserError(f"{where}: model is {model!r}, but it must be a section of keys (model: {{name: cnn}})")
    name = model_name or model.get("name", "own" if "import" in model else "cnn")
    if not isinstance(name, str) or name not in MODELS:
        raise UserError(f"{where}: model.name is {name!r}, but it must be one of {', '.join(MODELS)}")
    if model_name is not None and model_name != model.get("name", "own" if "import" in model else "cnn"):
        model = {}  # another model than the file's: the file's keys for it do not apply
    values = {**values, "model": {**model, "name": name}}
    return structure(values, MODELS[name], where)


def structure(values: dict[str, Any], model: type, where: str) -> Config:
    """Nested dict -> Config, with no unknown key and no wrong type."""
    sections = {"model": model, **{f.name: f.type for f in dataclasses.fields(Config) if f.name != "model"}}
    _refuse_unknown_keys(values, sections, where)
    parts = {name: _structure_section(values.get(name) or {}, cls, name, where) for name, cls in sections.items()}
    try:
        check_choices(parts["train"])
    except UserError as mistake:
        raise UserError(f"{where}: {mistake}") from None
    return Config(**parts)


def _structure_section(values: dict[str, Any], cls: Any, section: str, where: str) -> Any:
    fields = {field_name(key): (key, value) for key, value in values.items()}
    try:
        return cls(**{f: checked(cls, section, f, value, f"{section}.{key}") for f, (key, value) in fields.items()})
    except UserError as mistake:
        raise UserError(f"{where}: {mistake}") from None


def _refuse_unknown_keys(values: dict[str, Any], sections: dict[str, Any], where: str) -> None:
    valid = valid_keys(sections)
    for key in _dotted_keys(values, sections, where):
        if key not in valid:
            raise UserError(f"{where}: unknown key {key}{nearest(key, valid)}")


def valid_keys(sections: dict[str, Any]) -> list[str]:
    """`section.key` of every key, given each section's dataclass or an instance of it."""
    return [f"{name}.{key_name(f.name)}" for name, section in sections.items() for f in dataclasses.fields(section)]


def key_name(field: str) -> str:
    """What a config calls a field: Python allows none to be called `import`."""
    return field.removesuffix("_")


def field_name(key: str) -> str:
    return "import_" if key == "import" else key


def _dotted_keys(values: dict[str, Any], sections: dict[str, Any], where: str) -> Iterator[str]:
    for name, section in values.items():
        if name not in sections or section is None:
            yield from () if section is None and name in sections else (str(name),)
        elif isinstance(section, dict):
            yield from (f"{name}.{key}" for key in section)
        else:
            raise UserError(f"{where}: {name} is {section!r}, but it must be a section of keys")


def nearest(key: str, valid: list[str]) -> str:
    """A hint for a key that does not exist: the same name elsewhere, or the most alike."""
    if "." not in key and (section := difflib.get_close_matches(key, _sections(valid), n=1, cutoff=0.7)):
        return f"; did you mean {section[0]}?"
    if key.replace("_", "-") in COMMAND_FLAGS:
        return f": it is a flag of the command (--{key.replace('_', '-')}), not a key of the file"
    leaf = key.rsplit(".", 1)[-1]
    elsewhere = [v for v in valid if v.rsplit(".", 1)[-1] == leaf]
    if not elsewhere:  # a key of another model is misplaced, not misspelt
        owners = [n for n, cls in MODELS.items() if leaf in {f.name for f in dataclasses.fields(cls)}]
        if key.startswith("model.") and owners:
            return f": it belongs to model.name {' or '.join(owners)}"
    alike = elsewhere or difflib.get_close_matches(key, valid, n=1, cutoff=0.4)
    return f"; did you mean {alike[0]}?" if alike else f"; the sections are {', '.join(_sections(valid))}"


def _sections(valid: list[str]) -> list[str]:
    return sorted({v.split(".")[0] for v in valid})


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key given twice is an error, not a silent last one wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        merge = "tag:yaml.org,2002:merge"  # << : it may be there twice, and what it brings gives way
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        twice = sorted({str(k) for k in keys if keys.count(k) > 1})
        if twice:
            raise yaml.YAMLError(f"key {twice[0]} is given twice (line {node.start_mark.line + 1} ff.)")
        return super().construct_mapping(node, deep)

    def get_single_node(self) -> yaml.Node | None:
        """As it is composed, before anything is made of it: aliases may expand to more than can be read."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _count_nodes(node, [])
        return node


MOST_NODES = 10_000
"""Values of a config, those that aliases stand for counted each time."""
MOST_BYTES = 1_000_000


def _count_nodes(node: yaml.Node, above: list[yaml.Node]) -> int:
    if any(node is one for one in above):
        raise yaml.YAMLError("an anchor contains itself")
    total = 1
    children = node.value if isinstance(node, yaml.SequenceNode | yaml.MappingNode) else []
    for child in children:
        for one in child if isinstance(child, tuple) else (child,):
            total += _count_nodes(one, [*above, node])
            if total > MOST_NODES:
                raise yaml.YAMLError(f"it has more than {MOST_NODES:,} values, counting what aliases (*) stand for")
    return total


def read_yaml(file: Path) -> dict[str, Any]:
    try:
        with file.open(encoding="utf-8") as stream:  # a pipe too: lockstep train <(sed ... config.yaml)
            text = stream.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise UserError(f"{file}: is longer than {MOST_BYTES:,} characters, which no config is")
        values = yaml.load(text, Loader=_StrictLoader)
    except OSError as error:
        raise cannot_be_read(file, error.strerror) from error
    except UserError:
        raise
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: is not valid YAML: {' '.join(str(error).split())[:300]}") from error
    except (ValueError, OverflowError, RecursionError) as error:  # a date that is none, a number of 5,000 digits
        raise UserError(f"{file}: has a value that cannot be: {' '.join(str(error).split())[:200]}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{file}: holds {type(values).__name__}, but it must hold sections (model:, data:, ...)")
    return values


def save_config(config: Config, file: Path) -> None:
    """The resolved config, loadable again with `load_config`."""
    plain = _plain(dataclasses.asdict(config))
    file.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key_name(k): _plain(v) for k, v in value.items() if not (k == "import_" and v is None)}
    return list(value) if isinstance(value, tuple) else value
