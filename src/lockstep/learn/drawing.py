"""The messages between ranks, as a picture in text: time goes down, each rank is a line.

rank 0      rank 1      rank 2
  │──── 4 ───▶│           │        isend of 4, line 21
  │           │──── 4 ───▶│        isend of 4, line 21
  │◀──────── 4 ───────────│        isend of 4, line 21
  ╪═══════════╪═══════════╪        all_reduce of 12, line 30
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.learn.recorder import GRADING, RECEIVES, SENDS

WIDTH = 12
MOST = 24
"""Rows of a picture; what came before is left out, as it is the end that one wants to see."""


Logs = list[list[dict[str, Any]]]
"""The calls of each rank, as its recorder has written them down."""


@dataclass
class Event:
    """A message, or a collective that some or all ranks reached."""

    at: float
    text: str
    source: int = -1
    to: int = -1
    elements: int = 0
    """Of a message."""
    came: list[int] = field(default_factory=list)
    """Ranks of a collective."""
    whole: bool = True
    """Sent and received, or all came."""


def read_logs(folder: Path, size: int) -> Logs:
    """What each rank called. The last line of a rank that was ended may be cut short."""
    logs: Logs = []
    for rank in range(size):
        file = folder / f"rank{rank}.jsonl"
        rows = []
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        logs.append(rows)
    return logs


def in_the_grader(folder: Path, size: int) -> set[int]:
    """Ranks whose exercise has returned, and which wait for the others there."""
    return {rank for rank in range(size) if (folder / f"rank{rank}{GRADING}").exists()}


def last_calls(logs: Logs, grading: Collection[int] = ()) -> list[str]:
    """What each rank was in when it hung."""
    lines = []
    for rank, log in enumerate(logs):
        if rank in grading:
            lines.append(f"rank {rank} has returned, and waits in the check for the others")
            continue
        if not log:
            lines.append(f"rank {rank} called nothing")
            continue
        row = log[-1]
        word = "to" if row["op"] in SENDS else "from" if row["op"] in RECEIVES else "at"
        other = f" {word} rank {row['peer']}" if row["peer"] is not None else ""
        lines.append(f"rank {rank}: its last call is {called(row)}{other}, line {row['line']}")
    return lines


def called(row: dict[str, Any]) -> str:
    """all_reduce of 12, barrier"""
    return f"{row['op']} of {row['elements']:,}" if row["elements"] else str(row["op"])


def events_of(logs: Logs) -> list[Event]:
    """Messages matched by sender, receiver and order; collectives by their number on each rank."""
    found: list[Event] = []
    size = len(logs)
    waiting: dict[tuple[int, int], list[Event]] = {}
    for rank, log in enumerate(logs):
        for row in log:
            if row["op"] in SENDS and row["peer"] is not None:
                text = f"{called(row)}, line {row['line']}"
                event = Event(row["at"], text, rank, row["peer"], row["elements"], whole=False)
                found.append(event)
                waiting.setdefault((rank, row["peer"]), []).append(event)
    for rank, log in enumerate(logs):
        for row in log:
            if row["op"] in RECEIVES and row["peer"] is not None:
                sent = waiting.get((row["peer"], rank))
                if sent:
                    sent.pop(0).whole = True
                else:
                    text = f"{called(row)}, line {row['line']}; rank {row['peer']} never sent it"
                    found.append(Event(row["at"], text, row["peer"], rank, row["elements"], whole=False))
    for events in waiting.values():
        for event in events:
            event.text += f"; rank {event.to} never received it"
    collectives = [[r for r in log if r["op"] not in (*SENDS, *RECEIVES)] for log in logs]
    for number in range(max((len(c) for c in collectives), default=0)):
        rows = {rank: c[number] for rank, c in enumerate(collectives) if len(c) > number}
        kinds: dict[str, list[int]] = {}
        for rank, row in rows.items():
            root = f" at rank {row['peer']}" if row["peer"] is not None else ""
            kinds.setdefault(f"{called(row)}{root}", []).append(rank)
        for kind, came in kinds.items():
            lines = ", ".join(map(str, dict.fromkeys(rows[rank]["line"] for rank in came)))
            text = f"{kind}, line {lines}"
            whole = len(came) == size
            missing = [rank for rank in range(size) if rank not in came]
            others = "" if whole else f"; not rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            found.append(Event(max(rows[rank]["at"] for rank in came), text + others, came=came, whole=whole))
    return sorted(found, key=lambda event: event.at)


def draw(logs: Logs) -> str:
    """The last events; an empty text where there are none."""
    events, size = events_of(logs), len(logs)
    if not events or size < 2:
        return ""
    lines = ["".join(f"rank {rank}".ljust(WIDTH) for rank in range(size)).rstrip()]
    if len(events) > MOST:
        lines.append("  ⋮".ljust(WIDTH * size) + f"{len(events) - MOST:,} more before")
    for event in events[-MOST:]:
        row = _message(event, size) if event.source >= 0 else _collective(event, size)
        mark = "" if event.whole else "✗ "
        lines.append("".join(row).ljust(WIDTH * size) + mark + event.text)
    return "\n".join(line.rstrip() for line in lines)


def _column(rank: int) -> int:
    return 2 + rank * WIDTH


def _message(event: Event, size: int) -> list[str]:
    row = [" "] * (WIDTH * size)
    for rank in range(size):
        row[_column(rank)] = "│"
    if not 0 <= event.to < size or not 0 <= event.source < size or event.to == event.source:
        return row
    left, right = sorted((_column(event.source), _column(event.to)))
    for at in range(left + 1, right):
        row[at] = "─" if event.whole else "╌"
    label = f" {event.elements:,} "
    start = (left + right - len(label)) // 2 + 1
    row[start : start + len(label)] = label
    if event.to > event.source:
        row[right - 1] = "▶" if event.whole else "✗"
    else:
        row[left + 1] = "◀" if event.whole else "✗"
    return row


def _collective(event: Event, size: int) -> list[str]:
    row = [" "] * (WIDTH * size)
    for rank in range(size):
        row[_column(rank)] = "╪" if rank in event.came else "│"
    first, last = _column(min(event.came)), _column(max(event.came))
    for at in range(first + 1, last):
        if row[at] == " ":
            row[at] = "═"
    return row
