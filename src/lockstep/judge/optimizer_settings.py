"""What an optimizer is set to and what it steps, beside the reference's."""

from math import isclose
from typing import Any

from lockstep.judge.assemble import Place, Side
from lockstep.judge.verdict import Verdict, differs, words_of

IGNORED = {"foreach", "fused", "capturable", "differentiable", "initial_lr", "name", "param_names"}
"""Settings that say how it computes, not what."""
Settings = dict[str, dict[int, dict[str, Any]]]
"""Parameter -> rank -> its group's settings."""


def other_settings(reference: Side, candidate: Side, place: Place) -> Verdict | None:
    mine, theirs = settings_by_name(candidate, place), settings_by_name(reference, place)
    strays = {rank: event["strays"] for rank, event in candidate.events[place].items() if event["strays"]}
    known = max(event["strays"] for event in reference.events[place].values())
    if strays and max(strays.values()) > known:
        rank, count = next(iter(strays.items()))
        names = [name for name in theirs if name not in mine]
        return differs(
            place[1],
            "optimizer",
            names,
            sorted(strays),
            why=f"{count} of the optimizer's parameters on rank {rank} are not the model's",
            look_at="the optimizer must be made after the model is wrapped or sharded",
        )
    if missing := [name for name in theirs if name not in mine]:
        return differs(
            place[1],
            "optimizer",
            missing,
            [],
            why="parameters that the reference trains are in no rank's optimizer",
            look_at="the parameters that the optimizer is given",
        )
    for name, known in theirs.items():
        expected = next(iter(known.values()))
        for group in mine[name].values():
            for key in sorted(expected.keys() & group.keys() - IGNORED):
                if not alike(group[key], expected[key]):
                    return one_setting(place, key, expected[key], group[key], mine, theirs)
    return None


def one_setting(place: Place, key: str, expected: Any, got: Any, mine: Settings, theirs: Settings) -> Verdict:
    """One that differs."""
    off = {
        name: [r for r, group in mine[name].items() if not alike(group.get(key), next(iter(known.values())).get(key))]
        for name, known in theirs.items()
    }
    off = {name: ranks for name, ranks in off.items() if ranks}
    return differs(
        place[1],
        "optimizer",
        list(off),
        sorted({rank for ranks in off.values() for rank in ranks}),
        why=f"the optimizer's {key} is {shortly(got)} instead of {shortly(expected)}",
        look_at=f"where {key} is set" + (": is it scaled by the number of ranks?" if key == "lr" else ""),
        expected=shortly(expected),
        got=shortly(got),
    )


def settings_by_name(side: Side, place: Place) -> Settings:
    found: Settings = {}
    for rank, event in side.events[place].items():
        for name, group in event["trained"].items():
            found.setdefault(name, {})[rank] = event["settings"][group]
    return found


def skipped(candidate: Side, place: Place) -> Verdict | None:
    """A rank has been through the model twice as often as the others since its last step."""
    calls = {rank: len(event["inputs"]) for rank, event in candidate.events[place].items()}
    fewest = min(calls.values())
    late = [rank for rank, count in calls.items() if fewest and count >= 2 * fewest]
    if place[1] > 1 and late and len(late) < len(calls):
        return differs(
            place[1],
            "optimizer",
            [],
            late,
            why=f"{words_of(late)} took no step of the optimizer where the other ranks took one",
            look_at="what skips a step: a loss scale of its own, a condition that only some ranks meet",
        )
    return None


def alike(got: Any, expected: Any) -> bool:
    if isinstance(got, float | int) and isinstance(expected, float | int):
        return isclose(got, expected, rel_tol=1e-6, abs_tol=1e-12)
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(alike, got, expected))
    return bool(got == expected)


def shortly(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
