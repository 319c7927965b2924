"""Finds the planner's constants from published tables, and what error is left on rows that it has not seen.

python docs/results/fit_planner.py results.csv results_2.csv --held-out          # 3/4 of the rows, judged on the rest
python docs/results/fit_planner.py results.csv results_2.csv --without-sources   # each source by the others
python docs/results/fit_planner.py results.csv results_2.csv --out constants.csv # from all of them
"""

import argparse
import csv
from collections import defaultdict
from math import exp
from pathlib import Path
from statistics import mean

import numpy as np

from lockstep.plan.constants import Constants, entries, fitted
from lockstep.plan.fit import errors, fit, is_held_out, usable
from lockstep.plan.published import Row, read_rows

FREE = [name for name, entry in entries().items() if entry["from"] == "fitted to step times"]


def centre() -> Constants:
    """Where the search begins, and what it is held near: what one would have said without these rows."""
    return fitted().changed(**{name: float(entries()[name]["before"]) for name in FREE})


def show(rows: list[Row], found: np.ndarray) -> None:
    groups: dict[str, list[float]] = defaultdict(list)
    for row, error in zip(rows, found, strict=True):
        groups[row.source].append(float(error))
    for source, some in sorted(groups.items(), key=lambda item: -len(item[1])):
        sizes = [abs(exp(e) - 1) for e in some]
        print(f"{source:34} {len(some):4} rows  mean {mean(sizes):6.1%}  bias {exp(mean(some)) - 1:+6.1%}")
    sizes = [abs(exp(e) - 1) for e in found]
    total = f"{'all':34} {len(rows):4} rows  mean {mean(sizes):6.1%}  bias {exp(float(found.mean())) - 1:+6.1%}"
    print(total, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--without-sources", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [row for table in given.tables for row in read_rows(table) if usable(row)]
    start = centre()
    if given.held_out:
        seen, unseen = [r for r in rows if not is_held_out(r)], [r for r in rows if is_held_out(r)]
        found = fit(seen, start, FREE, start, given.rounds, workers=given.workers)
        print(f"{len(seen)} rows seen; the others:")
        show(unseen, errors(unseen, found))
    if given.without_sources:
        for source in dict.fromkeys(row.source for row in rows):
            seen, unseen = [r for r in rows if r.source != source], [r for r in rows if r.source == source]
            found = fit(seen, start, FREE, start, given.rounds, report=lambda _: None, workers=given.workers)
            show(unseen, errors(unseen, found))
    if given.out is not None:
        found = fit(rows, start, FREE, start, given.rounds, workers=given.workers)
        show(rows, errors(rows, found))
        with given.out.open("w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([["constant", "value"], *((n, f"{found[n]:.4g}") for n in FREE)])


if __name__ == "__main__":
    main()
