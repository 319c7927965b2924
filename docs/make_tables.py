"""Writes the tables of docs/planning.md and docs/choosing.md that are computed: constants, and the matrix.

python docs/make_tables.py
"""

import re
from pathlib import Path

from lockstep.cli.plan import known_network
from lockstep.plan.choose import SCENARIOS, matrix
from lockstep.plan.constants import told
from lockstep.plan.machine import parse_cluster

DOCS = Path(__file__).parent


def constants_table() -> str:
    lines = ["| constant | value | what it stands for | from |", "| --- | --- | --- | --- |"]
    for name, entry in told().items():
        lines.append(f"| `{name}` | {entry['value']:g} | {entry['says']} | {entry['from']} |")
    return "\n".join(lines)


def matrix_table() -> str:
    networks = {s.model: known_network(s.model, None) for s in SCENARIOS}
    return "\n".join(matrix(networks, {s.cluster: parse_cluster(s.cluster) for s in SCENARIOS}))


TABLES = {"planning.md": ("constants", constants_table), "choosing.md": ("matrix", matrix_table)}


def filled(file: str) -> str:
    """The page with its table as it would be written now."""
    name, table = TABLES[file]
    text = (DOCS / file).read_text(encoding="utf-8")
    pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
    return re.sub(pattern, lambda found: found[1] + table() + found[2], text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in TABLES:
        (DOCS / page).write_text(filled(page), encoding="utf-8")
        print(DOCS / page)
