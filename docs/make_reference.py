"""Writes docs/commands.md, docs/configs.md and docs/learn.md from the code.

python docs/make_reference.py
"""

import ast
import importlib
import os
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from lockstep.cli import COMMANDS, usage
from lockstep.config import models, schema
from lockstep.config.shipped import description, shipped_configs
from lockstep.learn.lesson import lessons

DOCS = Path(__file__).parent
WIDTH = "100"
"""Columns of the help texts."""


def commands_page() -> str:
    parts = [
        "# Commands\n\nEvery command, as its `--help` says it. Written by `python docs/make_reference.py`.\n",
        f"```text\n{usage()}\n```\n",
    ]
    for name, (module, answers) in COMMANDS.items():
        parts.append(f"## lockstep {name}\n\n{answers[0].upper()}{answers[1:]}.\n\n```text\n{help_of(module)}\n```\n")
    return "\n".join(parts)


def help_of(module: str) -> str:
    said = StringIO()
    os.environ["COLUMNS"] = WIDTH
    os.environ["NO_COLOR"] = "1"
    try:
        with redirect_stdout(said):
            importlib.import_module(module).main(["--help"])
    except SystemExit:
        pass
    text = "\n".join(line.rstrip() for line in said.getvalue().strip().splitlines())
    keys = "|".join(sections())
    shorter = re.sub(rf"(?ms)^ (?:{keys}) options\n.*?(?=^ [\w-]+ options\n|\Z)", "", text)
    return shorter if shorter == text else shorter.rstrip() + "\n\nand every key of a config as a flag: see configs.md"


def configs_page() -> str:
    parts = [
        "# Configs\n\nWritten by `python docs/make_reference.py`.\n\n## Ready ones\n",
        "By name, from any folder: `lockstep train digits_cnn`, or as if there were a folder of them: "
        "`configs/digits_cnn.yaml`. `lockstep configs digits_cnn` prints one.\n",
        "| name | what it is |\n| --- | --- |",
    ]
    parts += [f"| `{name}` | {description(file)} |" for name, file in shipped_configs().items()]
    parts.append("\n## Keys\n\nNested in a file, dotted as flags: `train: {lr: 0.1}` is `--train.lr 0.1`. Flags win.\n")
    for section, classes in sections().items():
        parts.append(f"### {section}\n")
        for title, words, fields in classes:
            heading = f"`{section}.name: {title}`: {words}" if len(classes) > 1 else words
            parts.append(f"{heading}\n\n| key | default | what it says |\n| --- | --- | --- |")
            parts += [f"| `{section}.{name}` | {default} | {says} |" for name, default, says in fields]
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"


Fields = list[tuple[str, str, str]]


def sections() -> dict[str, list[tuple[str, str, Fields]]]:
    """Section -> its dataclasses (the models are several), each with its keys and what their docstrings say."""
    sources = [Path(module.__file__).read_text(encoding="utf-8") for module in (models, schema)]
    bodies = {
        node.name: node for source in sources for node in ast.parse(source).body if isinstance(node, ast.ClassDef)
    }
    found: dict[str, list[tuple[str, str, Fields]]] = {}
    for statement in bodies["Config"].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            kind = ast.unparse(statement.annotation)
            names = ["MLP", "CNN", "ResNet", "GPT", "HF", "Own"] if kind == "Model" else [kind]
            found[statement.target.id] = [described(bodies[name]) for name in names if name in bodies]
    return found


def described(node: ast.ClassDef) -> tuple[str, str, Fields]:
    fields: Fields = []
    title = node.name
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        default = ast.unparse(statement.value) if statement.value is not None else ""
        if statement.target.id == "name" and isinstance(statement.value, ast.Constant) and node.name not in ("Data",):
            title = str(statement.value.value)
        says = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            says = re.sub(r"\s+", " ", str(following.value.value)).replace("|", "\\|")
        default = re.sub(r"field\(default_factory=(.*)\)", r"\1()", default)
        fields.append((statement.target.id.rstrip("_").replace("_", "-"), f"`{default}`", says))
    words = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
    return title, words, fields


COURSE = """# The course

Distributed training, built by hand: {count} lessons, from one process to three dimensions, in evenings, on a laptop.
Each is a text and one file to fill in, and is graded on real ranks: by values against one process, by calls and bytes
against the law, by memory, and, where that is the point, by what was hidden.

```bash
lockstep learn start
cd lockstep-course
lockstep learn check --watch
```

Read `01_data_wall/README.md`, open `01_data_wall/exercise.py` in your editor, and save: the check runs. `lockstep learn
next` shows the text of the lesson that comes next.

A failure says which rank, which parameter and which element, what was expected and what came, draws the messages
between the ranks, and calls known mistakes by their names. A hang is cut after ten seconds, with what each rank was
waiting for:

```text
✗ every rank sends first, and no rank receives: send and receive at once (exchange)
  the ranks hung; cut after 10 s: rank 2 waits at exercise.py line 60, in ring
  rank 0: its last call is send of 12 to rank 1, line 60
  rank 1: its last call is send of 12 to rank 2, line 60
  rank 2: its last call is send of 12 to rank 0, line 60

    rank 0      rank 1      rank 2
      ⋮                                 (the messages of naive and tree, which have ended)
      │╌╌╌╌ 12 ╌╌✗│           │         ✗ send of 12, line 60; rank 1 never received it
      │           │╌╌╌╌ 12 ╌╌✗│         ✗ send of 12, line 60; rank 2 never received it
      │✗╌╌╌╌╌╌╌╌╌ 12 ╌╌╌╌╌╌╌╌╌│         ✗ send of 12, line 60; rank 0 never received it
```

`lockstep learn hint` helps in three steps; after a pass `diff` shows the reference beside one's own, and says in
which file of Lockstep the idea lives in full. `check --share-gpu` grades the same file on ranks that share a GPU.
The last column has the names under which other courses teach the same.

<!-- written by python docs/make_reference.py -->

| lesson | minutes | ranks | needs | also known as |
| --- | --- | --- | --- | --- |
"""


def course_page() -> str:
    rows = []
    for lesson in lessons():
        manifest = lesson.manifest
        text = f"../{lesson.folder.relative_to(DOCS.parent)}/text.md"
        needs = ", ".join(map(str, manifest.needs))
        ranks = ", ".join(map(str, manifest.ranks))
        title = f"{lesson.number}. [{manifest.title}]({text})"
        rows.append(f"| {title} | {manifest.minutes} | {ranks} | {needs} | {', '.join(manifest.covers)} |")
    return COURSE.format(count=len(lessons())) + "\n".join(rows) + "\n"


PAGES = {"commands.md": commands_page, "configs.md": configs_page, "learn.md": course_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
