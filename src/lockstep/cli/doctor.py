"""`lockstep doctor`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.cli.parsing import parse, refuse_positional
from lockstep.cli.tables import console, new_table
from lockstep.doctor.finding import Finding
from lockstep.doctor.machine import machine
from lockstep.doctor.running import look_at
from lockstep.doctor.trial import backends, master
from lockstep.doctor.variables import variables

MARKS = {"fine": "[green]✓[/]", "note": "[yellow]![/]", "wrong": "[red]✗[/]"}


@dataclass
class DoctorArguments:
    """What is here, and does it work? Versions, GPUs, cores, memory, limits, network, environment, folders, and a real
    all-reduce of two ranks on each backend. The exit status is 1 where something is wrong, with the line to mend it.

    For example:

    lockstep doctor

    lockstep doctor --master node1:29500

    lockstep doctor runs/20261117-120000-cnn-digits-bucketed

    The last asks the ranks of a run what they are doing, and names one that the others wait for; the run goes on.
    """

    trial: bool = True
    """Start two ranks on each backend."""
    master: str | None = None
    """host:port where ranks of several machines are to meet: does it resolve, is the port free?"""


def main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        refuse_positional(argv[1:], "doctor")
        parse(DoctorArguments, argv[1:], "doctor")
        said, hangs = look_at(Path(argv[0]))
        print(said)
        return 1 if hangs else 0
    refuse_positional(argv, "doctor")
    arguments = parse(DoctorArguments, argv, "doctor")
    found = list(findings(arguments))
    screen = console()
    table = new_table("this machine", ("", "what"), (), ("found", "to mend"))
    for one in found:
        table.add_row(MARKS[one.verdict], one.topic, one.what, one.mend)
    screen.print(table)
    wrong = sum(one.verdict == "wrong" for one in found)
    notes = sum(one.verdict == "note" for one in found)
    screen.print(f"{len(found)} things looked at: {wrong} wrong, {notes} worth a look", highlight=False)
    return 1 if wrong else 0


def findings(arguments: DoctorArguments) -> Iterator[Finding]:
    if arguments.master is not None:
        yield from master(arguments.master)
    yield from machine()
    yield from variables()
    if arguments.trial:
        yield from backends()
