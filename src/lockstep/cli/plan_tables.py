"""What `lockstep plan` shows, and a layout as a row of a table."""

from typing import Any

from lockstep.cli.tables import console, new_table
from lockstep.plan.explain import explained, warnings
from lockstep.plan.memory import GIB
from lockstep.plan.search import Answer, Question, ScoredLayout, judge, least_gpus, neighbours
from lockstep.words import counted, duration, three_figures


def show(answer: Answer, top: int, tokens: float | None, explain: bool) -> None:
    """`tokens`: to train on in all."""
    screen, question = console(), answer.question
    network = question.network
    screen.print(
        f"[bold]{network.name}[/]: {network.parameters / 1e9:.3g}B parameters, {network.depth} layers, "
        f"{network.flops_per_token() / 1e9:.3g} GFLOP per {'token' if network.context > 1 else 'sample'}; "
        f"{question.cluster} ({counted(question.cluster.gpus, 'GPU')}), global batch {question.global_batch:,} x "
        f"{network.context:,}, {question.precision}",
        soft_wrap=True,
        highlight=False,
    )
    if not answer.plans:
        nothing_fits(screen, answer)
        return
    unit = "tokens/s" if network.context > 1 else "samples/s"
    table = new_table(
        f"the fastest of {answer.fitting:,} layouts that fit, of {answer.considered:,} that are legal",
        ("layout",),
        ("step", "in 4 of 5 such\npredictions", unit, "MFU\n%", "GiB\nper rank"),
        ("memory", "bound by"),
    )
    for plan in answer.shown(top):
        low, high = plan.interval_s
        table.add_row(
            str(plan.layout),
            duration(plan.time.seconds),
            between(low, high),
            three_figures(plan.tokens_per_s),
            f"{100 * plan.mfu:.1f}",
            f"{plan.memory.gib:.1f}",
            plan.fits,
            plan.time.bound_by,
        )
    screen.print(table)
    if any(plan.fits == "risky" for plan in answer.shown(top)):
        screen.print("risky, and so last: more than four fifths of the free memory; it may run", highlight=False)
    best = answer.best
    parts = ", ".join(
        f"{name} {seconds / best.time.seconds:.0%}"
        for name, seconds in sorted(best.time.terms.items(), key=lambda item: -item[1])
        if seconds > 0.005 * best.time.seconds
    )
    screen.print(f"the first one's step: {parts}", highlight=False)
    held = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in best.memory.kinds.items() if size > 0.05 * GIB)
    screen.print(f"its memory, GiB, on stage {best.memory.stage}: {held}", highlight=False)
    if tokens is not None:
        days = best.days(tokens)
        screen.print(
            f"{three_figures(tokens / 1e9)}B tokens: {three_figures(days)} days, "
            f"{three_figures(24 * days * best.layout.ranks)} GPU-hours",
            highlight=False,
        )
    fewest = least_gpus(question)
    if fewest is not None:
        screen.print(f"the fewest GPUs that hold it: {fewest[0]:,} ({fewest[1].layout})", highlight=False)
    show_neighbours(screen, question, best)
    for line in warnings(best):
        screen.print(f"[yellow]note: {line}[/]", soft_wrap=True)
    if explain:
        show_terms(screen, best)


def between(low: float, high: float) -> str:
    """63.2 - 76.3 s"""
    first, second = duration(low), duration(high)
    same = first.split()[1] == second.split()[1]
    return f"{first.split()[0] if same else first} - {second}"


def nothing_fits(screen: Any, answer: Answer) -> None:
    question = answer.question
    screen.print("[red]no layout fits[/]" if answer.considered else "[red]no layout is legal[/]")
    for reason, count in answer.refused.most_common(5):
        screen.print(f"  {count:,} x {reason}")
    if answer.smallest is not None:
        plan = judge(question, answer.smallest)
        screen.print(
            f"the smallest needs {plan.memory.gib:.1f} of {question.cluster.machine.memory_gib:g} GiB: {plan.layout}; "
            f"take more GPUs, a smaller global batch, or --fix offload=1",
            soft_wrap=True,
        )


def show_neighbours(screen: Any, question: Question, best: ScoredLayout) -> None:
    table = new_table("one step away from the best", ("change",), ("step", "of the\nbest", "GiB"), ("",))
    for words, found in neighbours(question, best):
        if isinstance(found, str):
            table.add_row(words, "-", "-", "-", found)
        else:
            ratio = found.time.seconds / best.time.seconds
            table.add_row(words, duration(found.time.seconds), f"{ratio:.2f}", f"{found.memory.gib:.1f}", found.fits)
    screen.print(table)


def show_terms(screen: Any, best: ScoredLayout) -> None:
    table = new_table(f"every term of {best.layout}", ("term",), ("number",), ("formula", "stands in"))
    for row in explained(best):
        table.add_row(*row)
    screen.print(table)
    screen.print("constants: plan/constants.yaml, each with what it stands for; docs/planning.md", highlight=False)


def as_row(plan: ScoredLayout) -> dict[str, Any]:
    return {
        **plan.figures(),
        **{f"{name}_s": seconds for name, seconds in plan.time.terms.items()},
        **{f"{kind}_gib": size / GIB for kind, size in plan.memory.kinds.items()},
    }
