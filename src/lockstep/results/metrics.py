"""What a training run has logged of its steps: `metrics.jsonl`, one record a line. `training/metrics.py` writes it."""

import json
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


def step_of(line: str) -> int | None:
    """Of a whole record; None for a line that a kill has cut off."""
    try:
        step = json.loads(line).get("step") if line.endswith("\n") else None
    except (ValueError, AttributeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Whole records, in order; none where there is no file. Of steps that were taken twice, the later ones."""
    file = folder / METRICS
    records: list[dict[str, Any]] = []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if file.exists() else []
    for line in lines:
        step = step_of(line)
        if step is None:
            continue
        if records and step < records[-1]["step"]:
            records = [earlier for earlier in records if earlier["step"] < step]
        records.append(json.loads(line))
    return records
