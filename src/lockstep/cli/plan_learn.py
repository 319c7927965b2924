"""`lockstep plan learn`."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.cli.parsing import parse
from lockstep.cli.tables import console, new_table
from lockstep.errors import UserError
from lockstep.plan.learn import improved, learned
from lockstep.plan.machine import HERE, read_machine
from lockstep.words import duration


@dataclass
class PlanLearnArguments:
    """Put runs that have been trained beside what the planner says of them, and let the machine file know: its `step`
    factor becomes what makes these predictions right in the mean.

    For example:

    lockstep plan learn runs/a runs/b

    lockstep plan learn runs/* --machine my_node.yaml
    """

    machine: str = str(HERE)
    """The machine file to improve: what lockstep calibrate wrote."""
    dry: bool = False
    """Only show; change nothing."""


def main(argv: list[str]) -> int:
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    arguments = parse(PlanLearnArguments, argv[count:], "plan learn RUN")
    if not count:
        raise UserError("lockstep plan learn needs runs: lockstep plan learn runs/NAME ...")
    file = Path(arguments.machine)
    if not file.exists():
        raise UserError(f"--machine {file}: there is no such file; lockstep calibrate writes it")
    machine = read_machine(file)
    runs = [learned(Path(folder), machine) for folder in argv[:count]]
    better = improved(machine, runs)
    table = new_table(
        "runs beside their predictions", ("run", "layout"), ("measured", "predicted", "error\n%", "then\n%"), ()
    )
    scale = better.factors["step"] / machine.factors.get("step", 1.0)
    for run in runs:
        cells = (duration(run.measured_s), duration(run.predicted_s))
        errors = (100 * (1 / run.ratio - 1), 100 * (scale / run.ratio - 1))
        table.add_row(run.folder.name, str(run.setting.layout), *cells, *(f"{error:+.1f}" for error in errors))
    screen = console()
    screen.print(table)
    if not arguments.dry:
        better.save(file)
        screen.print(f"{file}: step factor {better.factors['step']:g}", highlight=False)
    return 0
