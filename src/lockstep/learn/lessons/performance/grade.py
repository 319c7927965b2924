"""The formulas, on spans that overlap in every way; and profiles with planted troubles."""

import random
from statistics import median

from lockstep.intervals import covered
from lockstep.learn.rank import Rank

SERIAL, RANKS = 0.1, 8
PHASES = ("data", "forward", "backward", "wait")
PROFILES = [  # the answer; seconds of data, forward, backward, wait for each rank
    ("none", [(1, 30, 60, 9), (1, 31, 61, 7), (2, 29, 60, 9)]),
    ("data", [(40, 30, 60, 5), (38, 30, 61, 6), (41, 29, 60, 5)]),
    ("communication", [(1, 30, 60, 55), (1, 31, 60, 54), (1, 30, 61, 54)]),
    ("rank 2", [(1, 30, 60, 60), (1, 31, 61, 59), (1, 50, 100, 1), (2, 30, 59, 60)]),
    ("rank 0", [(1, 70, 60, 1), (1, 30, 60, 41), (1, 31, 61, 39)]),
    ("data", [(1, 30, 60, 39), (40, 30, 60, 0), (1, 31, 60, 38)]),  # of one rank, for which the others wait
    ("none", [(22, 30, 60, 3), (22, 31, 60, 2), (21, 30, 60, 4)]),  # 19% of the step, though 24% of computing
    ("data", [(60, 30, 60, 1), (1, 50, 100, 1), (1, 30, 60, 60)]),  # and a straggler, who comes second
    ("none", [(1, 30, 60, 15), (1, 37, 73, 1), (1, 30, 60, 14)]),  # 1.22 of the median
    ("rank 3", [(1, 30, 60, 60), (1, 40, 80, 30), (1, 30, 60, 60), (1, 50, 100, 1), (1, 30, 61, 60)]),  # two; the worse
    ("communication", [(1, 30, 60, 3), (1, 30, 60, 30), (1, 31, 60, 3)]),  # of one rank
]


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
        mistakes = {
            "that is all communication, hidden or not": everything,
            "messages that are in flight at once were counted twice": doubled,
        }
        rank.expect_number(f"case {case}: exposed({compute}, {comm})", got, right, mistakes)

    speedup = {"efficiency: that is the speedup; the efficiency is the speedup of each rank": 3.2}
    rank.expect_number("efficiency(8.0, 2.5, 4)", exercise.efficiency(8.0, 2.5, 4), 0.8, speedup)
    rank.expect_number("amdahl(0.25, 4)", exercise.amdahl(0.25, 4), 1 / (0.25 + 0.75 / 4))
    rank.expect_number("amdahl(0.0, 7)", exercise.amdahl(0.0, 7), 7.0)
    ring = 2 * 3 / 4 * 4e9 / 1e10
    got = exercise.speedup(2.0, 4e9, 1e10, 4, 0.25)
    rank.expect_number("speedup(2.0, 4e9, 1e10, 4, 0.25)", got, 2 / (0.5 + 0.75 * ring))

    for expected, rows in PROFILES:
        profile = [dict(zip(PHASES, map(float, row), strict=True)) for row in rows]
        got = exercise.bottleneck([dict(phases) for phases in profile])
        table = "\n".join(
            f"  rank {i}: {', '.join(f'{k} {v:g} s' for k, v in p.items())}" for i, p in enumerate(profile)
        )
        computing = [phases["forward"] + phases["backward"] for phases in profile]
        said = f"bottleneck: expected {expected!r}, got {got!r} (the median of computing is {median(computing):g} s)"
        blamed = expected.startswith("rank") and got == "communication"
        name = f"waiting is the symptom: the others wait for {expected}, which computes longer" if blamed else None
        rank.agree(None if got == expected else f"{said}\n{table}", name)
    rank.guess("PREDICTED_SPEEDUP", exercise.amdahl(SERIAL, RANKS), by="it is")
    slow = exercise.speedup(0.1, 500e6, 125e6, 2, 0.0)
    rank.note(f"125 million parameters, 0.1 s a step, two ranks over 1 Gbit/s: {slow:.2f} times as fast as one")


def _span(dice: random.Random) -> tuple[float, float]:
    start = float(dice.randint(0, 20))
    return start, start + dice.randint(1, 8)
