"""`lockstep doctor`."""

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.cli.parsing import parse, refuse_positional
from lockstep.cli.tables import console, new_table
from lockstep.doctor.finding import Finding
from lockstep.doctor.machine import machine
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
    """

    trial: bool = True
    """Start two ranks on each backend."""
    master: str | None = None
    """host:port where ranks of several machines are to meet: does it resolve, is the port free?"""


def main(argv: list[str]) -> int:
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
