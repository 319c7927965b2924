"""17. Things break: five sabotaged runs. python exercise.py a"""

import sys

UNEVEN, DEAD, WRONG = "uneven inputs", "a dead rank", "a wrong collective"
SCALE, CORRUPT = "a forgotten scale", "a corrupt checkpoint"

ANSWERS: dict[str, tuple[str, int | str] | None] = {
    #: solution
    "a": (UNEVEN, 1),
    "b": (DEAD, 2),
    "c": (WRONG, 1),
    "d": (SCALE, 4),
    "e": (CORRUPT, "__1_0.distcp"),
    #: skeleton
    # "a": None,  # (one of the five causes, the rank, the factor or the file that it is about)
    # "b": None,
    # "c": None,
    # "d": None,
    # "e": None,
    #: wrong blames-the-first
    # "a": (UNEVEN, 0),
    # "b": (DEAD, 0),
    # "c": (WRONG, 1),
    # "d": (SCALE, 4),
    # "e": (CORRUPT, "__1_0.distcp"),
    #: wrong swaps
    # "a": (WRONG, 1),
    # "b": (DEAD, 2),
    # "c": (UNEVEN, 1),
    # "d": (SCALE, 4),
    # "e": (CORRUPT, "__1_0.distcp"),
    #: wrong says-rounding
    # "a": (UNEVEN, 1),
    # "b": (DEAD, 2),
    # "c": (WRONG, 1),
    # "d": (SCALE, 1),
    # "e": (CORRUPT, "__1_0.distcp"),
    #: end
}

if __name__ == "__main__":
    from lockstep.learn.lessons.things_break.sabotage import run

    run(sys.argv[1] if len(sys.argv) > 1 else "")
