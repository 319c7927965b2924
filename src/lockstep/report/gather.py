"""Finding results: records (`record.py`) in files and folders; a training run's metrics come with it."""

from pathlib import Path

from lockstep.errors import UserError
from lockstep.results.metrics import read_metrics
from lockstep.results.record import Record, read_record

RUN = "run.json"


def gather(places: list[Path]) -> list[Record]:
    """The records in these files, and in these folders at any depth; the order of a folder's is by name."""
    records: list[Record] = []
    for place in places:
        if not place.exists():
            raise UserError(f"{place} does not exist; give results that --json, train, profile or demo have written")
        found = [place] if place.is_file() else [file for file in sorted(place.rglob("*.json")) if is_record(file)]
        if not found:
            raise UserError(f"{place} has no results in it; those are written by --json, train, profile and demo")
        for file in found:
            record = read_record(file)
            if record.kind == "train":
                record.result = {**record.result, "metrics": read_metrics(file.parent)}
                record.title = record.title or file.parent.name
            records.append(record)
    return records


def is_record(file: Path) -> bool:
    """Without reading all of a file that is something else."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return b'"lockstep_record"' in opened.read(200)
