"""The formulas, on spans that overlap in every way; and profiles with planted troubles."""

import random

from lockstep.intervals import covered
from lockstep.learn.rank import Rank

SERIAL, RANKS = 0.1, 8
PHASES = ("data", "forward", "backward", "wait")
PROFILES = {  # seconds of data, forward, backward, wait for each rank
    "none": [(1, 30, 60, 9), (1, 31, 61, 7), (2, 29, 60, 9)],
    "data": [(40, 30, 60, 5), (38, 30, 61, 6), (41, 29, 60, 5)],
    "communication": [(1, 30, 60, 55), (1, 31, 60, 54), (1, 30, 61, 54)],
    "rank 2": [(1, 30, 60, 60), (1, 31, 61, 59), (1, 50, 100, 1), (2, 30, 59, 60)],
    "rank 0": [(1, 70, 60, 1), (1, 30, 60, 41), (1, 31, 61, 39)],
}


def facts() -> list[str]:
    """Numbers of the text."""
    return [
        f"How many times faster are {RANKS} ranks",
        "best 1 / (s + (1 - s) / n)",
        "never more than 1 / s",
        "2(n-1)/n of their bytes",
        "t1, with n ranks",
        "t1 / tn",
    ]


def grade(rank: Rank) -> None:
    exercise = rank.exercise
    dice = random.Random(4)
    cases = [[[(0.0, 10.0)], [(5.0, 12.0)]], [[(0.0, 4.0)], [(2.0, 8.0), (5.0, 9.0)]]]
    cases += [[[_span(dice) for _ in range(dice.randint(0, 4))] for _ in range(2)] for _ in range(30)]
    for case, (compute, comm) in enumerate(cases):
        right = covered([*compute, *comm]) - covered(compute)
        got = exercise.exposed(list(compute), list(comm))
        everything = sum(b - a for a, b in comm)
        doubled = everything - sum(max(0.0, min(e, b) - max(s, a)) for s, e in comm for a, b in compute)
        shown = f"exposed({compute}, {comm}): expected {right:g}, got {got:g}"
        wrong = abs(got - right) > 1e-9
        if wrong and abs(got - everything) < 1e-9 and compute:
            rank.expect(False, f"that is all communication, hidden or not\n{shown}")
        if wrong and abs(got - doubled) < 1e-9:
            rank.expect(False, f"messages that are in flight at once were counted twice\n{shown}")
        rank.expect(not wrong, f"case {case}: {shown}")

    got = exercise.efficiency(8.0, 2.5, 4)
    rank.expect(abs(got - 3.2) > 1e-9, "efficiency: that is the speedup; the efficiency is the speedup of each rank")
    _close(rank, "efficiency(8.0, 2.5, 4)", got, 0.8)
    _close(rank, "amdahl(0.25, 4)", exercise.amdahl(0.25, 4), 1 / (0.25 + 0.75 / 4))
    _close(rank, "amdahl(0.0, 7)", exercise.amdahl(0.0, 7), 7.0)
    ring = 2 * 3 / 4 * 4e9 / 1e10
    _close(rank, "speedup(2.0, 4e9, 1e10, 4, 0.25)", exercise.speedup(2.0, 4e9, 1e10, 4, 0.25), 2 / (0.5 + 0.75 * ring))

    for expected, rows in PROFILES.items():
        profile = [dict(zip(PHASES, map(float, row), strict=True)) for row in rows]
        got = exercise.bottleneck([dict(phases) for phases in profile])
        table = "\n".join(
            f"  rank {i}: {', '.join(f'{k} {v:g} s' for k, v in p.items())}" for i, p in enumerate(profile)
        )
        if expected.startswith("rank") and got == "communication":
            rank.expect(
                False, f"waiting is the symptom: the others wait for {expected}, which computes longer\n{table}"
            )
        rank.expect(got == expected, f"bottleneck: expected {expected!r}, got {got!r}\n{table}")
    rank.guess("PREDICTED_SPEEDUP", exercise.amdahl(SERIAL, RANKS))
    slow = exercise.speedup(0.1, 500e6, 125e6, 2, 0.0)
    rank.note(f"125 million parameters, 0.1 s a step, two ranks over 1 Gbit/s: {slow:.2f} times as fast as one")


def _span(dice: random.Random) -> tuple[float, float]:
    start = float(dice.randint(0, 20))
    return start, start + dice.randint(1, 8)


def _close(rank: Rank, what: str, got: float, expected: float) -> None:
    rank.expect(abs(got - expected) <= 1e-9 * abs(expected), f"{what}: expected {expected:.6g}, got {got:.6g}")
