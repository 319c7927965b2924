"""`lockstep profile`."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.cli.arguments import RunArguments
from lockstep.cli.checks import check_before_ranks
from lockstep.cli.flags import config_from, sections
from lockstep.cli.parsing import parse
from lockstep.cli.tables import console, new_table
from lockstep.config import Config
from lockstep.config.user_code import shown_name
from lockstep.errors import UserError
from lockstep.launch import run_on_ranks
from lockstep.profile import Profile, profile_steps
from lockstep.profile.diagnosis import KINDS, words
from lockstep.profile.nvtx import mark_steps
from lockstep.results.record import Record
from lockstep.strategies import strategy_name
from lockstep.training.metrics import writing_to
from lockstep.words import counted

TRACE, RECORD = "trace.json.gz", "profile.json"


@dataclass
class ProfileArguments(RunArguments):
    """Take some steps under torch.profiler, all ranks on one time base, and say what the run is bound by.

    Writes to --run-dir: trace.json.gz, for chrome://tracing or ui.perfetto.dev, with a row for each rank's operations,
    one for its collectives in flight and one for its waits; and profile.json, for `lockstep report`.

    For example:

    lockstep profile configs/gpt_text.yaml --nproc 2 --parallel.data zero3

    lockstep profile --model.name mlp --nproc 4 --parallel.data naive --run-dir runs/naive

    nsys profile --capture-range=cudaProfilerApi lockstep profile configs/gpt_text.yaml --nproc 1 --nvtx
    """

    run_dir: str = "runs/profile"
    """Folder of what is written."""
    steps: int = 3
    """Profiled steps."""
    warmup: int = 3
    """Steps before."""
    memory_snapshot: bool = False
    """On a GPU: also write memory.pickle, rank 0's allocations, for pytorch.org/memory_viz."""
    nvtx: bool = False
    """On a GPU, under nsys: mark the steps, blocks and operations as NVTX ranges instead, and write nothing."""


def main(argv: list[str]) -> int:
    config, rest = config_from(argv)
    arguments = parse(ProfileArguments, rest, "profile", default=ProfileArguments(**sections(config)))
    config = arguments.config()
    if arguments.steps < 1 or arguments.warmup < 0:
        raise UserError(f"--steps {arguments.steps} --warmup {arguments.warmup}: at least 1 step and 0 warm-up steps")
    check_before_ranks(config, arguments.launch, default_nproc=2)
    if arguments.nvtx:
        if arguments.memory_snapshot:
            raise UserError("--nvtx writes no file, so --memory-snapshot has nowhere to go; give one of the two")
        parameters: int = run_on_ranks(
            *(mark_steps, config, arguments.steps, arguments.warmup), launch=arguments.launch, default_nproc=2
        )[0]
        if os.environ.get("RANK", "0") == "0":
            marked = f"{counted(arguments.steps, 'step')} of {shown_name(config.model)}, {parameters:,} parameters"
            console().print(f"marked: {marked}, as NVTX ranges; nsys has them if it was started around this command")
        return 0
    folder = Path(arguments.run_dir)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    snapshot = folder / "memory.pickle" if arguments.memory_snapshot else None
    found: Profile = run_on_ranks(
        *(profile_steps, config, arguments.steps, arguments.warmup, folder / TRACE, snapshot),
        launch=arguments.launch,
        default_nproc=2,
    )[0]
    if os.environ.get("RANK", "0") == "0":
        show(found, config, folder, snapshot)
    return 0


def show(found: Profile, config: Config, folder: Path, snapshot: Path | None) -> None:
    screen = console()
    ranks = len(found.diagnoses)
    kinds = [kind for kind in KINDS if kind in found.diagnoses[0].shares]
    table = new_table(
        f"{shown_name(config.model)}, {found.parameters:,} parameters, {strategy_name(config.parallel)}",
        ("rank",),
        ("step\nms", *(f"{kind}\n% of it" for kind in kinds)),
    )
    for rank, diagnosis in enumerate(found.diagnoses):
        shares = (f"{100 * diagnosis.shares[kind]:.0f}" for kind in kinds)
        table.add_row(str(rank), f"{diagnosis.step_ms:.1f}", *shares)
    screen.print(table)
    first = found.diagnoses[0]
    lines = words(first, config, ranks)
    if first.comm_ms:
        hidden = max(0.0, 1 - first.exposed_ms / first.comm_ms)
        lines.append(
            f"communication, on rank 0: {first.comm_ms:.1f} ms of a step in flight, {first.exposed_ms:.1f} ms waited "
            f"for, so {hidden:.0%} hidden behind computation"
        )
    operations = ", ".join(f"{name} {share:.0%}" for name, share in first.top[:5])
    for line in [*lines, f"longest operations, of the time in all of them: {operations}"]:
        screen.print(line, highlight=False, soft_wrap=True)
    written = [folder / TRACE, folder / RECORD, *([snapshot] if snapshot else [])]
    result = {"diagnoses": found.diagnoses, "timelines": found.timelines, "words": lines}
    title = f"{strategy_name(config.parallel)}, {counted(ranks, 'rank')}"
    with writing_to(folder):
        Record("profile", result, asdict(config), title=title).write(folder / RECORD)
    screen.print(f"written: {', '.join(map(str, written))} ({found.events:,} events in the trace)", soft_wrap=True)
