"""Finding results: records (`record.py`) in files and folders; a training run's metrics come with it."""

import json
from pathlib import Path

from lockstep.errors import UserError
from lockstep.record import Record, read_record

RUN = "run.json"
METRICS = "metrics.jsonl"


def gather(places: list[Path]) -> list[Record]:
    """The records in these files, and in these folders at any depth; the order of a folder's is by name."""
    records: list[Record] = []
    for place in places:
        if not place.exists():
            raise UserError(f"{place} does not exist; give results that --json, train, profile or demo have written")
        if place.is_file():
            records.append(read_record(place))
            continue
        found = [file for file in sorted(place.rglob("*.json")) if is_record(file)]
        if not found:
            raise UserError(f"{place} has no results in it; those are written by --json, train, profile and demo")
        records += [read_record(file) for file in found]
        for record, file in zip(records[-len(found) :], found, strict=True):
            if record.kind == "train":
                record.result = {**record.result, "metrics": read_metrics(file.parent / METRICS)}
                record.title = record.title or file.parent.name
    return records


def is_record(file: Path) -> bool:
    """Without reading all of a file that is something else."""
    with file.open("rb") as opened:
        return b'"lockstep_record"' in opened.read(200)


def read_metrics(file: Path) -> list[dict[str, object]]:
    """A line that was cut off in the middle (a run that is still going) is left out."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
