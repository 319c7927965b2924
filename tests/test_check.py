"""A check of an exercise: whatever that does, it ends in time, is said in a line, and its messages are drawn."""

import re
import subprocess
from pathlib import Path

import pytest

from lockstep.learn.check import check
from lockstep.learn.drawing import draw
from lockstep.learn.lesson import lesson_named, lessons
from tests.test_lessons import outcome_of

# ---- the drawing ---------------------------------------------------------------------------------------------------


def call(op: str, at: float, peer: int | None = None, elements: int = 4, line: int = 7) -> dict[str, object]:
    return {"op": op, "at": at, "peer": peer, "elements": elements, "line": line}


def test_messages_are_drawn() -> None:
    logs = [
        [call("isend", 1.0, 1), call("irecv", 1.1, 1), call("all_reduce", 3.0, elements=12)],
        [call("isend", 1.2, 0), call("irecv", 1.3, 0), call("all_reduce", 3.1, elements=12), call("recv", 5.0, 0)],
    ]
    lines = draw(logs).splitlines()
    assert lines[0].split() == ["rank", "0", "rank", "1"]
    assert "▶" in lines[1]
    assert "isend of 4, line 7" in lines[1]
    assert "◀" in lines[2]
    assert "═" in lines[3]
    assert "all_reduce of 12" in lines[3]
    assert "recv of 4, line 7; rank 0 never sent it" in lines[4]


def test_a_collective_that_one_rank_does_not_come_to() -> None:
    drawn = draw([[call("all_reduce", 1.0)], [call("broadcast", 1.0, 0)], [call("all_reduce", 1.0)]])
    assert "✗ all_reduce of 4, line 7; not rank 1" in drawn
    assert "✗ broadcast of 4 at rank 0, line 7; not ranks 0, 2" in drawn


# ---- exercises that do anything ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_exercise_that_never_ends_is_cut(tmp_path: Path) -> None:
    lesson = lessons()[0]
    begin = "    losses: list[float] = []\n"
    text = lesson.solution.replace(begin, begin + "    while True:\n        pass\n")
    file = tmp_path / "exercise.py"
    file.write_text(text)
    outcome = check(lesson, file)
    assert not outcome.passed
    assert re.search(r"did not end within 10 s: it is at exercise.py line \d+", outcome.problem)


FIRST, THIRD = lessons()[0].solution, lessons()[2].solution
ODD = {  # what an exercise may do -> its lesson, its file, what is said of it; None: it passes all the same
    "leaves": (1, "import os; os._exit(0)\n", "os._exit(0) at exercise.py line 1"),
    "leaves in good order": (1, "import sys; sys.exit(0)\n", "SystemExit: 0"),
    "one rank leaves": (
        3,
        "import os, torch.distributed as d\nif d.get_rank() == 1: os._exit(0)\n" + THIRD,
        "on rank 1: os._exit(0) at exercise.py line 2",
    ),
    "is interrupted": (1, "raise KeyboardInterrupt\n", "exercise.py line 1, in <module>: KeyboardInterrupt"),
    "is empty": (3, "", "exercise.py has no 'start_alike'"),
    "meets what torch has not": (
        1,
        FIRST.replace("loss = mean_squared_error(model(x), y)", "loss = nn.Module()(x)"),
        "in train: NotImplementedError: Module [Module] is missing",
    ),
    "is no text": (1, "x = 1\0\n", "exercise.py line 1: source code string cannot contain null bytes"),
    "gives nothing": (
        3,
        THIRD.replace("return places if first", "return [None] * len(places) if first"),
        "the check cannot use what exercise.py gave: TypeError",
    ),
    "sends other bytes": (
        3,
        THIRD.replace("dist.all_gather(places, value)", "dist.all_gather(places, value)\n    cut(value)")
        + "\ndef cut(value):\n    dist.all_reduce(value[: 1 + 9 * dist.get_rank()].clone())\n",
        "came where a rank expects",
    ),
    "leaves a thread": (
        1,
        "import threading, time\nthreading.Thread(target=time.sleep, args=(300,)).start()\n" + FIRST,
        None,
    ),
    "leaves a process": (3, "import subprocess; subprocess.Popen(['sleep', '297'])\n" + THIRD, None),
    "changes torch": (
        1,
        "import torch; torch.set_grad_enabled(False); torch.set_default_dtype(torch.float64)\n" + FIRST,
        None,
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_exercises(name: str, tmp_path: Path) -> None:
    number, text, said = ODD[name]
    outcome = outcome_of(lesson_named(str(number)), text, tmp_path)
    assert outcome.passed == (said is None), outcome.problem
    assert (said or "") in outcome.problem
    if name == "leaves a process":
        running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert "sleep 297" not in running


@pytest.mark.slow
def test_an_exercise_that_cannot_be_left_is_ended(tmp_path: Path) -> None:
    text = "import time\nwhile True:\n    try: time.sleep(1)\n    except BaseException: pass\n"
    outcome = outcome_of(lessons()[0], text, tmp_path, slowdown=1)
    assert "it did not end within 20 s" in outcome.problem
    assert "rank 0: exercise.py line 3" in outcome.problem
