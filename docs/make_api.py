"""Writes docs/api.md from the docstrings of what `import lockstep` offers.

python docs/make_api.py
"""

import inspect
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import lockstep
import lockstep.comm

TARGET = Path(__file__).parent / "api.md"
CHAPTERS = {
    "Your own loop": ("init", "spawn", "shard_batch", "clip_grad_norm_", "save", "load"),
    "Data parallel": ("DataParallel", "LocalSGD"),
    "Sharded": ("ShardedOptimizer", "ShardedDataParallel", "FullyShardedDataParallel"),
    "Tensor parallel": ("tensor_parallel", "vocab_parallel_cross_entropy"),
    "Pipeline parallel": ("Pipeline", "pipeline_schedule"),
    "Context parallel": ("shard_sequence", "gather_sequence", "ring_attention", "ulysses_attention"),
    "Experts": ("MixtureOfExperts", "expert_parallel"),
    "Optimizers": ("Muon", "LowBitAdamW", "ScheduleFreeAdamW", "WeightAverage"),
    "Precision": ("in_float8",),
    "Mistakes": ("UserError",),
}
HEAD = """# API reference

What `import lockstep` offers to a user's own loop; `help(lockstep)` says the same. Each example is run by a test, on
two ranks. Written by `python docs/make_api.py` from the docstrings.
"""

COMM = """## Collectives: `lockstep.comm`

Names and meanings are those of torch.distributed. Each works in a world of one process as well, and is counted by the
ledger under its `purpose`. `all_reduce_async(...)` and the like return at once with a `Pending`: `wait()` before
touching the tensors. Roots and peers are ranks of the group.

```python
from lockstep.comm import all_reduce_mean

mean = all_reduce_mean(torch.ones(3) * world.rank)  # over all ranks; group=: over some
```
"""


def page() -> str:
    parts = [HEAD]
    for chapter, names in CHAPTERS.items():
        parts.append(f"## {chapter}\n")
        parts += [entry(name, getattr(lockstep, name)) for name in names]
    return "\n".join([*parts, COMM, *collectives()]) + "\n"


def collectives() -> list[str]:
    """A row for each of `lockstep.comm`."""
    rows = ["| call | what it does |", "| --- | --- |"]
    for name in lockstep.comm.__all__:
        function = getattr(lockstep.comm, name)
        rows.append(f"| `{name}{arguments(function)}` | {first_line(function)} |")
    return rows


def entry(name: str, thing: Any) -> str:
    lines = [f"### `{name}`\n"]
    if not (inspect.isclass(thing) and issubclass(thing, Exception)):
        lines.append(f"```python\n{signature(name, thing)}\n```\n")
    lines.append(in_markdown(inspect.getdoc(thing) or ""))
    if inspect.isclass(thing):
        made = inspect.cleandoc(thing.__init__.__doc__ or "")
        if "__init__" in vars(thing) and made:
            lines.append(in_markdown(made))
        lines += [f"- `{method}{arguments(of)}`: {first_line(of)}" for method, of in methods(thing)]
        lines.append("")
    return "\n".join(lines)


def signature(name: str, thing: Any) -> str:
    given = inspect.signature(thing)
    words = [shown(p) for p in given.parameters.values() if p.name != "self"]
    whole = f"{name}({', '.join(words)})"
    return whole if len(whole) <= 110 else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + ")"


def shown(parameter: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}".replace("'", '"')
    default = re.sub(r"<RedOpType\.(\w+): \d+>", r"\1", default)
    return f"{star}{parameter.name}{default}"


def arguments(method: Any) -> str:
    words = [shown(p) for p in inspect.signature(method).parameters.values() if p.name != "self"]
    return f"({', '.join(words)})"


def methods(thing: Any) -> list[tuple[str, Any]]:
    own = [(n, m) for n, m in vars(thing).items() if inspect.isfunction(m) and not n.startswith("_")]
    return [(n, m) for n, m in own if inspect.getdoc(m)]


def first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")


def in_markdown(doc: str) -> str:
    """Indented blocks are code."""
    code = re.sub(r"(?m)(^ {4}.*\n?(?:^(?: {4}.*)?\n?)*)", lambda found: fenced(found[1]), doc)
    return code.strip() + "\n"


def fenced(block: str) -> str:
    return f"```python\n{dedent(block).strip()}\n```\n\n"


def examples(doc: str) -> str:
    """The indented blocks of a docstring, as code."""
    return dedent("\n".join(line for line in doc.splitlines() if line.startswith("    ")))


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"{TARGET}: {sum(map(len, CHAPTERS.values()))} names")
