"""`lockstep plan check`."""

from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

from lockstep.cli.parsing import check_output, parse
from lockstep.cli.tables import console, new_table, write_rows
from lockstep.errors import UserError
from lockstep.plan.check import Judged, errors_by_source, judge, summary
from lockstep.plan.published import read_rows

MOST_WITHOUT = 0.05


@dataclass
class PlanCheckArguments:
    """Predict every row of a table of published results at its own layout, and say how far that is from what they
    measured: by source, beside a predictor that knows one efficiency per GPU kind and type.

    The table has the columns source, model, seq, gpu, gpus, tp, pp, dp, and as many of params_b, layers, hidden, heads,
    kv_heads, ffn, vocab, cp, zero_stage, micro_batch, global_batch, recompute, precision, vpp, ep, etp, schedule,
    feasible, step_time_s, tokens_per_s_per_gpu, tflops_per_gpu, mfu, peak_mem_gib, notes as there are.

    For example:

    lockstep plan check results.csv --out predicted.csv
    """

    out: str | None = None
    """Write the rows with predicted_step_s, predicted_peak_gib and fits to this file."""


def main(argv: list[str]) -> int:
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    arguments = parse(PlanCheckArguments, argv[count:], "plan check FILE.csv")
    if not count:
        raise UserError("lockstep plan check needs a table: lockstep plan check results.csv")
    if arguments.out is not None:
        check_output("--out", arguments.out)
    rows = [row for file in argv[:count] for row in read_rows(Path(file))]
    judged = [judge(row) for row in track(rows, "predicting", console=console(), transient=True)]
    if arguments.out is not None:
        write_rows([one.cells() for one in judged], Path(arguments.out))
    show(judged)
    return 0 if any(one.time is not None for one in judged) else 1


def show(judged: list[Judged]) -> None:
    screen = console()
    table = new_table(
        "error of the predicted step time, %",
        ("source",),
        ("rows", "mean", "median", "worst", "bias", "one con-\nstant", "regret", "memory"),
        ("worst row",),
    )
    for e in errors_by_source(judged):
        numbers = [f"{100 * value:.1f}" for value in (e.mean, e.median, e.worst)]
        table.add_row(
            *(e.source, str(e.rows), *numbers, f"{100 * e.bias:+.1f}", f"{100 * e.simple:.1f}"),
            "-" if e.regret is None else f"{100 * e.regret:.1f}",
            "-" if e.memory is None else f"{100 * e.memory:.1f}",
            e.worst_row,
        )
    screen.print(table)
    found = summary(judged)
    memory = f", memory {found.memory:.1%}" if found.memory is not None else ""
    screen.print(
        f"{found.judged:,} rows: mean {found.mean:.1%}, median {found.median:.1%}, bias {found.bias:+.1%}{memory}"
        f"; {found.predicted:,} of {found.rows:,} rows predicted",
        highlight=False,
    )
    screen.print(
        "one constant: FLOP over peak, by the median efficiency of its GPU and type, found in these rows. regret:\n"
        "how much slower the layout we would have chosen was than the best of a sweep. memory: error of the peak.",
        highlight=False,
    )
    screen.print(
        f"memory: {found.wrongly_full} of {found.ran} rows that ran are said not to fit; "
        f"{len(found.wrongly_fits)} that ran out of memory are said to fit",
        highlight=False,
    )
    without = [one for one in judged if one.time is None]
    for one in without[:10]:
        screen.print(f"not predicted: {one.row.source}, {one.row.cells['model']}: {one.row.reason}", soft_wrap=True)
    if len(without) > MOST_WITHOUT * len(judged):
        screen.print(f"[yellow]{len(without)} of {len(judged)} rows cannot be predicted[/]")
    for words in found.wrongly_fits:
        screen.print(f"[red]said to fit, and ran out of memory: {words}[/]")
