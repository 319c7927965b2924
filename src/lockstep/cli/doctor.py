"""`lockstep doctor`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.cli.parsing import parse, refuse_positional
from lockstep.cli.tables import console, new_table
from lockstep.doctor.finding import Finding
from lockstep.doctor.machine import machine
from lockstep.doctor.nodes import Report, by_ssh, differences, from_every_node, local_report
from lockstep.doctor.running import look_at
from lockstep.doctor.trial import backends, master
from lockstep.doctor.variables import variables
from lockstep.launch import Launch, adopt_environment, run_on_ranks
from lockstep.words import counted

MARKS = {"fine": "[green]✓[/]", "note": "[yellow]![/]", "wrong": "[red]✗[/]"}


@dataclass
class DoctorArguments:
    """What is here, and does it work? Versions, GPUs, cores, memory, limits, network, environment, folders, and a real
    all-reduce of two ranks on each backend. The exit status is 1 where something is wrong, with the line to mend it.

    For example:

    lockstep doctor

    lockstep doctor --master node1:29500

    lockstep doctor --nodes node1 node2

    srun --nodes=4 --ntasks-per-node=1 lockstep doctor

    lockstep doctor runs/20261117-120000-cnn-digits-bucketed

    The last asks the ranks of a run what they are doing, and names one that the others wait for; the run goes on.
    """

    trial: bool = True
    """Start two ranks on each backend."""
    master: str | None = None
    """host:port of the rendezvous of several machines: does it resolve, is the port free?"""
    nodes: tuple[str, ...] = ()
    """Ask these nodes, by ssh, and show first what differs between them. Under srun and torchrun every node of the job
    is asked."""
    json: bool = False
    """Print one line of JSON, for a program."""


def main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        refuse_positional(argv[1:], "doctor")
        parse(DoctorArguments, argv[1:], "doctor")
        said, hangs = look_at(Path(argv[0]))
        print(said)
        return 1 if hangs else 0
    refuse_positional(argv, "doctor")
    arguments = parse(DoctorArguments, argv, "doctor")
    if arguments.nodes:
        return several(by_ssh(arguments.nodes, arguments.trial))
    if adopt_environment():
        arguments.trial = False  # the ranks of this job are the trial
        report = local_report(list(findings(arguments)))
        reports = run_on_ranks(from_every_node, report, launch=Launch(backend="gloo", device="cpu"))[0]
        return several(reports) if reports else 0
    found = list(findings(arguments))
    if arguments.json:
        print(local_report(found).to_json())
        return int(any(one.verdict == "wrong" for one in found))
    return shown("this machine", found, found)


def several(reports: list[Report]) -> int:
    """What differs first, then of each node what is not as it should be."""
    found = list(differences(reports))
    status = shown(
        f"between {counted(len(reports), 'node')}", found or [Finding("nodes", "nothing differs that matters")], found
    )
    for report in reports:
        amiss = [one for one in report.findings if one.verdict != "fine"]
        status |= shown(report.node, amiss or [Finding("node", "nothing to mend")], report.findings)
    return status


def shown(title: str, rows: list[Finding], found: list[Finding]) -> int:
    screen = console()
    table = new_table(title, ("", "what"), (), ("found", "to mend"))
    for one in rows:
        table.add_row(MARKS[one.verdict], one.topic, one.what, one.mend)
    screen.print(table)
    wrong = sum(one.verdict == "wrong" for one in found)
    notes = sum(one.verdict == "note" for one in found)
    if found:
        screen.print(f"{len(found)} things looked at: {wrong} wrong, {notes} worth a look", highlight=False)
    return 1 if wrong else 0


def findings(arguments: DoctorArguments) -> Iterator[Finding]:
    if arguments.master is not None:
        yield from master(arguments.master)
    yield from machine()
    yield from variables()
    if arguments.trial:
        yield from backends()
