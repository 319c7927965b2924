"""Which collectives a rank has taken part in before each step: torch's flight recorders know all of them, also those
that DDP issues in C++. Nothing is wrapped, and the script runs as it is.
"""

from collections import Counter
from math import prod
from typing import Any

import torch.distributed as dist

from lockstep.launch.calls import groups_by_name, operation_of, recorders

Line = tuple[str, tuple[int, ...], int, int]
"""Operation, ranks, calls, elements."""
RECORDED = {"TORCH_FR_BUFFER_SIZE": "4000"}
"""Calls that the recorder keeps: enough for a step."""


class Ledger:
    """Of one process."""

    def __init__(self) -> None:
        self._read: list[int] = []
        """Of each recorder, the number of the last call that was read."""

    def since(self) -> list[Line]:
        """What has been called since it was asked last."""
        if not (dist.is_available() and dist.is_initialized()):
            return []
        groups = groups_by_name()
        calls, elements = Counter[tuple[str, tuple[int, ...]]](), Counter[tuple[str, tuple[int, ...]]]()
        for i, entries in enumerate(recorders()):
            self._read += [-1] * (i + 1 - len(self._read))
            for entry in entries:
                if int(entry["record_id"]) > self._read[i]:
                    key = operation_of(entry), groups.get(entry["process_group"][0], ())
                    calls[key] += 1
                    elements[key] += sum(prod(sizes) for sizes in entry["input_sizes"])
            if entries:
                self._read[i] = int(entries[-1]["record_id"])
        return [(*key, calls[key], elements[key]) for key in sorted(calls)]


def reductions(lines: list[Any]) -> list[Line]:
    """Of gradients, as it may be: what adds up over ranks."""
    return [(name, tuple(ranks), calls, size) for name, ranks, calls, size in lines if "reduce" in name]


def said(lines: list[Line]) -> str:
    """2 all_reduce over ranks 0, 1 (1,200 elements)"""
    return "; ".join(
        f"{calls} {name} over ranks {', '.join(map(str, ranks))} ({size:,} elements)"
        for name, ranks, calls, size in lines
    )


def missing(lines: dict[int, list[Line]], copies: set[int], without: int, all_elements: int) -> str:
    """What the others' gradients have, and these have not.

    `lines`: of each rank, its reductions before the step. `copies`: the ranks that hold the gradients in question,
    which have `without` of `all_elements`.
    """
    first = lines[min(lines)]
    if not any(lines.values()):
        return "no rank took part in any reduction before this step"
    other = next(
        (rank for rank in lines if said(lines[rank]) != said(first) and sizes(lines[rank]) != sizes(first)), None
    )
    if other is not None:
        return f"rank {min(lines)}: {said(first) or 'none'}; rank {other}: {said(lines[other]) or 'none'}"
    wide = [line for line in first if copies <= set(line[1])]
    if not wide:
        return f"{said(first)}; none over all of ranks {', '.join(map(str, sorted(copies)))}, which hold copies"
    carried = sum(size for _, _, _, size in wide)
    if without < all_elements and carried == all_elements - without:
        return f"{said(wide)}: the other gradients have as many, and these {without:,} went through none"
    return said(first)


def sizes(lines: list[Line]) -> list[tuple[str, int, int]]:
    """Without the ranks: on each its own groups."""
    return [(name, calls, size) for name, _, calls, size in lines]
