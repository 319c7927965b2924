"""`lockstep judge`."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from lockstep.bar import Bar
from lockstep.cli.parsing import check_output, parse, refuse_positional
from lockstep.cli.tables import console
from lockstep.errors import UserError
from lockstep.results.whole import write_whole
from lockstep.words import counted

if TYPE_CHECKING:
    from lockstep.judge.compare import Judgement
    from lockstep.judge.verdict import Verdict


RUNS = 5
"""At most: the reference three times, the candidate twice."""
MOST_NAMES = 6
COLORS = {"equal": "green", "differs": "red", "cannot": "yellow"}


@dataclass
class JudgeArguments:
    """Is a script that trains on many ranks the same training as in one process? Both commands are run as they are,
    watched from inside, and compared step by step: weights, samples, the optimizer's settings, gradients, the norm,
    buffers.

    The two must read the same global batch at each step. The exit status is 0 where they are equal, 1 where they
    differ, 2 where it cannot be said.

    For example:

    lockstep judge --reference "python train.py --batch 16" --candidate "torchrun --nproc_per_node 2 train.py --batch 8"

    lockstep judge --reference "python train.py" --candidate "accelerate launch train.py" --steps 3 --html judged.html
    """

    reference: str = ""
    """The command of one process, as in a shell."""
    candidate: str = ""
    """The command that is in question."""
    steps: int = 6
    """Steps of the optimizer to compare; then both commands are ended."""
    same_start: bool = True
    """Give the candidate the reference's weights, where its ranks agree but the seed was another."""
    dropout: bool = True
    """With --no-dropout nothing is dropped in either run."""
    strict: bool = False
    """Every bit must be equal: no allowance for rounding."""
    share_gpu: bool = False
    """All ranks of the candidate use the first GPU, over NCCL: their LOCAL_RANK is 0."""
    timeout: float = 300.0
    """Seconds in which a command must have come a step further."""
    json: str | None = None
    """Also write the verdict to this file."""
    html: str | None = None
    """Also write a page with every tensor by step."""


def main(argv: list[str]) -> int:
    refuse_positional(argv, "judge")
    arguments = parse(JudgeArguments, argv, "judge")
    for flag, command in (("--reference", arguments.reference), ("--candidate", arguments.candidate)):
        if not command.strip():
            raise UserError(f'lockstep judge needs {flag}: a command in quotes, as {flag} "python train.py"')
    if arguments.steps < 1:
        raise UserError(f"--steps is {arguments.steps}, but it must be 1 or more")
    if not arguments.timeout > 0:
        raise UserError(f"--timeout is {arguments.timeout:g}, but it must be more than 0 seconds")
    for flag, file in (("--json", arguments.json), ("--html", arguments.html)):
        if file is not None:
            check_output(flag, file)
    return judged(arguments)


def judged(arguments: JudgeArguments) -> int:
    from lockstep.judge.judging import Asked, judge
    from lockstep.judge.page import write_page
    from lockstep.judge.verdict import STATUS
    from lockstep.launch.join import choose_device

    choose_device("auto", 0, 1, arguments.share_gpu)  # refuses it where there is no GPU
    asked = Asked(
        reference=arguments.reference,
        candidate=arguments.candidate,
        steps=arguments.steps,
        same_start=arguments.same_start,
        no_dropout=not arguments.dropout,
        strict=arguments.strict,
        timeout=arguments.timeout,
        share_gpu=arguments.share_gpu,
    )
    screen = console()

    def keep(verdict: "Verdict", judgement: "Judgement") -> None:
        if arguments.html is not None:
            write_page(verdict, judgement, said(verdict), Path(arguments.html))

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("starting", total=RUNS)

        def say(what: str) -> None:
            bar.update(task, description=f"running the {what}", advance=1)

        with ended_by_signals():
            verdict = judge(asked, say, keep)
    headline, _, rest = said(verdict).partition("\n")
    screen.print(f"[bold {COLORS[verdict.verdict]}]{headline}[/]", highlight=False, soft_wrap=True)
    if rest:
        screen.print(rest, highlight=False, markup=False, soft_wrap=True)
    if arguments.json is not None:
        write_whole(Path(arguments.json), json.dumps(verdict.to_json(), indent=2) + "\n")
    return STATUS[verdict.verdict]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """A closed terminal and a canceled job end what was started, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def said(verdict: "Verdict") -> str:
    """All of it, on one screen."""
    if verdict.verdict == "cannot":
        rows = [("why", verdict.why)]
        headline = "cannot be said"
    elif verdict.verdict == "equal":
        headline, rows = f"equal, over {counted(verdict.steps, 'step')}", [("why", verdict.why)]
    else:
        headline = f"differs at step {verdict.step}, first in: {verdict.what}"
        rows = [
            ("tensors", names_in(verdict.names)),
            ("ranks", ", ".join(map(str, verdict.ranks))),
            ("expected", verdict.expected),
            ("got", verdict.got),
            ("why", verdict.why),
            ("ledger", verdict.ledger),
            ("look at", verdict.look_at),
        ]
    rows += [("note", note) for note in verdict.notes]
    return "\n".join([headline, *(f"  {label:<9} {text}" for label, text in rows if text)])


def names_in(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
