"""Which samples all ranks together have seen at a step, beside those of the reference: by the digests of rows."""

from collections import Counter
from typing import Any

from lockstep.judge.assemble import Place, Side
from lockstep.judge.verdict import words_of


class Samples:
    """What all ranks together have seen at a step, beside what the reference has."""

    def __init__(self, reference: Side, candidate: Side, place: Place) -> None:
        self.wrong = ""
        """What is wrong, if it is known."""
        self.certain = False
        """All rows are known: some were seen twice, and others never."""
        self.ranks: list[int] = []
        theirs, mine = seen_by(reference, place), seen_by(candidate, place)
        wanted = [row for rows in theirs.values() for row in rows[0]]
        if not wanted or not any(rows[0] for rows in mine.values()):
            return
        if any(self._is_same(theirs, mine, dim) for dim in range(2)) or self._same_elements(theirs, mine):
            return
        alike = {kind_of(event) for event in reference.events[place].values()}
        others = [r for r, event in candidate.events[place].items() if kind_of(event) not in alike]
        known = set(wanted)
        self._say(wanted, {r: rows[0] for r, rows in mine.items() if r not in others or known & set(rows[0])})

    def _is_same(self, theirs: dict[int, Any], mine: dict[int, Any], dim: int) -> bool:
        wanted = Counter(row for rows in theirs.values() for row in rows[dim])
        got = Counter(row for rows in mine.values() for row in rows[dim])
        if wanted.keys() != got.keys():
            return False
        times = {got[row] / wanted[row] for row in wanted}
        return len(times) == 1 and (next(iter(times)) == 1 or self._shared(mine, dim))

    def _shared(self, mine: dict[int, Any], dim: int) -> bool:
        """Ranks that share a copy of the model read the same: each batch is that of as many ranks."""
        batches = Counter(tuple(rows[dim]) for rows in mine.values() if rows[dim])
        return len(set(batches.values())) == 1

    def _same_elements(self, theirs: dict[int, Any], mine: dict[int, Any]) -> bool:
        """Cut along both dimensions: all elements together."""
        wanted, got = (sum(rows[2] for rows in side.values()) % 2**64 for side in (theirs, mine))
        return any((got - times * wanted) % 2**64 == 0 for times in range(1, len(mine) + 1))

    def _say(self, wanted: list[int], mine: dict[int, list[int]]) -> None:
        known = set(wanted)
        if not any(known & set(rows) for rows in mine.values()):
            count = sum(len(rows) for rows in mine.values())
            if count % len(wanted) == 0:
                self.wrong = f"none of the {len(wanted)} samples of the reference's step was seen, but {count} others"
                self.ranks = sorted(mine)
            return
        seen = Counter(row for rows in mine.values() for row in rows)
        often = Counter(wanted)
        twice = [row for row in known if seen[row] > often[row]]
        never = [row for row in known if row not in seen]
        others = sum(1 for rows in mine.values() for row in rows if row not in known)
        self.ranks = sorted(rank for rank, rows in mine.items() if set(rows) & set(twice) or set(rows) - known)
        parts = []
        if twice:
            by = [rank for rank, rows in mine.items() if set(rows) & set(twice)]
            parts.append(f"{len(twice)} of {len(wanted)} samples were seen more than once (by {words_of(by)})")
        if never:
            parts.append(f"{len(never)} of {len(wanted)} samples were never seen")
        if others:
            parts.append(f"{others} samples are not of the reference's step")
        self.wrong, self.certain = ", ".join(parts), bool(twice and never and not others)


def kind_of(event: dict[str, Any]) -> Any:
    """Of samples: what a stage of a pipeline is given by another rank is of another kind."""
    return tuple((tensor["dtype"], tuple(tensor["shape"][1:])) for tensors in event["inputs"][:1] for tensor in tensors)


def seen_by(side: Side, place: Place) -> dict[int, tuple[list[int], list[int], int]]:
    """Rank -> digests of its rows along both dimensions, and of its elements. Of several tensors with as many rows, one
    digest for each row of all.
    """
    found = {}
    for rank, event in side.events.get(place, {}).items():
        rows: tuple[list[int], list[int]] = ([], [])
        elements = 0
        for tensors in event["inputs"]:
            for dim in range(2):
                sized = [t["rows"][dim] for t in tensors if len(t["rows"]) > dim]
                if sized:
                    same = [column for column in sized if len(column) == len(sized[0])]
                    rows[dim].extend(hash(row) for row in zip(*same, strict=True))
            elements += sum(t["elements"] for t in tensors)
        found[rank] = (*rows, elements)
    return found
